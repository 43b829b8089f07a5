"""Captures from real SGLang servers, one for each configuration, shared by every test that looks at it."""

import fcntl
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
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
    """Makes models, prompts and captures below one folder, each once, whatever number of processes ask."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _once(self, path: Path, make: Callable[[Path], object]) -> Path:
        """Make what `path` names unless another test, here or in another process, has."""
        with path.with_name(f"{path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                make(path)
        return path

    def target(self, kind: str) -> Path:
        return self._once(self.folder / kind, _WRITERS[kind])

    def draft(self, kind: str, ids: tuple[int, ...]) -> Path:
        target = self.target(kind)
        return self._once(
            self.folder / f"{kind}-draft-{'_'.join(map(str, ids))}",
            lambda path: models.write_eagle3_draft(path, target, layer_ids=ids),
        )

    def prompts(self) -> Path:
        """Four prompts of different lengths."""
        lines = [str([(7 * i + 3 * j) % 256 for j in range(5 + 9 * i)]) for i in range(4)]
        text = "".join(f'{{"input_ids": {line}}}\n' for line in lines)
        return self._once(self.folder / "prompts.jsonl", lambda path: path.write_text(text))

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
        name = hashlib.sha256(repr(configuration).encode()).hexdigest()[:12]
        out = self.folder / f"infer-{name}.h5"

        def make(record: Path) -> None:
            record.write_text(json.dumps(asdict(self._capture(configuration, out)), default=str))

        record = self._once(out.with_suffix(".json"), make)
        found = Captured(**json.loads(record.read_text()))
        found.trace, found.target = out, self.target(configuration.target)
        found.draft = None if found.draft is None else Path(found.draft)
        return found

    def _capture(self, configuration: Configuration, out: Path) -> Captured:
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
        )

    def reference(self, kind: str, layers: str = "") -> Path:
        """The transformers reference of the same requests: all depths, or the outputs of ``layers``."""

        def make(out: Path) -> None:
            chosen = ["--layers", layers] if layers else []
            done = run_hsprobe(
                "capture", "--model", self.target(kind), "-o", out, "--prompts", self.prompts(),
                "--max-new-tokens", "20", "--dtype", "float32", *chosen, seconds=CAPTURE_SECONDS,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr

        name = f"reference-{kind}-{re.sub(',', '_', layers) or 'all'}.h5"
        return self._once(self.folder / name, make)
