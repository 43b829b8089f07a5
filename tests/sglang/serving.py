"""Captures from real SGLang servers, one for each configuration, shared by every test that looks at it."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from hsprobe.fixtures import cpu, models

_WRITERS = {
    "llama": models.write_llama,
    "qwen3": models.write_qwen3,
    "deepseek": models.write_deepseek_v3,
}
CAPTURE_SECONDS = float(os.environ.get("HSPROBE_TEST_SECONDS", "400"))


@dataclass(frozen=True)
class Configuration:
    """One way to serve.

    Attributes:
        target: "llama", "qwen3" (8 layers) or "deepseek" (8 layers, MLA and MoE), with random weights.
        ids: ``eagle_aux_hidden_state_layer_ids`` of the draft; ``None`` serves without a draft.
        steps: ``--speculative-num-steps``.
        overlap: SGLang's overlap scheduling, which its CPU path otherwise turns off when it speculates.
        tp, pp: ranks of tensor parallelism, stages of the pipeline.
        fused: sums over ranks are fused with the norms that follow them, as on a GPU.
        arguments: more server arguments.
        options: options of ``hsprobe capture``.
    """

    target: str = "llama"
    ids: tuple[int, ...] | None = (1, 3, 5)
    steps: int = 3
    overlap: bool = False
    tp: int = 1
    pp: int = 1
    fused: bool = False
    arguments: tuple[str, ...] = ()
    options: tuple[str, ...] = ("--max-new-tokens", "20", "--concurrency", "4")

    @property
    def ranks(self) -> int:
        return self.tp * self.pp


@dataclass
class Captured:
    """What ``hsprobe capture`` did."""

    trace: Path
    target: Path
    draft: Path | None
    returncode: int
    stdout: str
    stderr: str
    environment: dict[str, str] = field(repr=False, default_factory=dict)


def run_hsprobe(*arguments: str | Path, environment: dict[str, str] | None = None, seconds: float = 120):
    """Run the ``hsprobe`` command as a person would."""
    return subprocess.run(
        [sys.executable, "-m", "hsprobe", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=seconds,
        env={**(environment or os.environ), "COLUMNS": "100"},
    )


class Kitchen:
    """Makes models, prompts and captures below one folder, each once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._captures: dict[Configuration, Captured] = {}
        self._references: dict[tuple[str, str], Path] = {}

    def target(self, kind: str) -> Path:
        path = self.folder / kind
        if not path.exists():
            _WRITERS[kind](path)
        return path

    def draft(self, kind: str, ids: tuple[int, ...]) -> Path:
        path = self.folder / f"{kind}-draft-{'_'.join(map(str, ids))}"
        if not path.exists():
            models.write_eagle3_draft(path, self.target(kind), layer_ids=ids)
        return path

    def prompts(self) -> Path:
        """Four prompts of different lengths."""
        path = self.folder / "prompts.jsonl"
        lines = [str([(7 * i + 3 * j) % 256 for j in range(5 + 9 * i)]) for i in range(4)]
        path.write_text("".join(f'{{"input_ids": {line}}}\n' for line in lines))
        return path

    def server_arguments(self, configuration: Configuration) -> list[str]:
        arguments = [f"--model-path={self.target(configuration.target)}", *cpu.SERVER_ARGUMENTS]
        if configuration.ids is not None:
            draft = self.draft(configuration.target, configuration.ids)
            arguments += cpu.speculative_arguments(draft, configuration.steps)
        if configuration.tp > 1:
            arguments.append(f"--tp-size={configuration.tp}")
        if configuration.pp > 1:
            arguments.append(f"--pp-size={configuration.pp}")
        return [*arguments, *configuration.arguments]

    def capture(self, configuration: Configuration) -> Captured:
        """Serve, capture and stop, the first time it is asked for."""
        if configuration not in self._captures:
            self._captures[configuration] = self._capture(configuration)
        return self._captures[configuration]

    def _capture(self, configuration: Configuration) -> Captured:
        out = self.folder / f"infer-{len(self._captures)}.h5"
        environment = cpu.environment(overlap=configuration.overlap, ranks=configuration.ranks)
        if configuration.fused:
            environment[cpu.FUSED] = str(out.with_suffix(".fused"))
        done = run_hsprobe(
            "capture",
            "--server",
            "-o",
            out,
            "--prompts",
            self.prompts(),
            *configuration.options,
            "--",
            *self.server_arguments(configuration),
            environment=environment,
            seconds=CAPTURE_SECONDS,
        )
        ids = configuration.ids
        return Captured(
            trace=out,
            target=self.target(configuration.target),
            draft=None if ids is None else self.draft(configuration.target, ids),
            returncode=done.returncode,
            stdout=done.stdout,
            stderr=done.stderr,
            environment=environment,
        )

    def reference(self, kind: str, layers: str = "") -> Path:
        """The transformers reference of the same requests: all depths, or the outputs of ``layers``."""
        key = (kind, layers)
        if key not in self._references:
            out = self.folder / f"reference-{kind}-{re.sub(',', '_', layers) or 'all'}.h5"
            chosen = ["--layers", layers] if layers else []
            done = run_hsprobe(
                "capture", "--model", self.target(kind), "-o", out, "--prompts", self.prompts(),
                "--max-new-tokens", "20", "--dtype", "float32", *chosen, seconds=CAPTURE_SECONDS,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            self._references[key] = out
        return self._references[key]
