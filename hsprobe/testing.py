"""Assertions for tests: the message is the finding, its first line what is wrong.

Trouble (an unreadable file, nothing to compare) is an `HsprobeError`, never a failed assertion.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from hsprobe.remote.location import Location, locate

if TYPE_CHECKING:
    from hsprobe.diagnose.model import Report

NEW_TOKENS = 16
DUMP_PROMPTS = 32
"""Samples of a dump that a server is sent."""


class DifferentError(AssertionError):
    """A failed assertion about traces. `report` is all that was found out, where two traces were compared."""

    def __init__(self, message: str, report: Report | None = None) -> None:
        super().__init__(message)
        self.report = report


class Captures(Protocol):
    """What can record a trace, such as `hsprobe_server`."""

    def capture(self, out: Path, prompts: Location | str, *, max_new_tokens: int = ...) -> Path:
        """Send these prompts and write what the server computed to `out`."""


def assert_traces_match(
    train: Location | str, infer: Location | str, *, noise: Path | str | None = None
) -> None:
    """Check that a capture holds the hidden states that the draft was trained on.

    Args:
        train: the training dump as its producer wrote it, or a trace of it or of the whole model.
        infer: trace of the running server.
        noise: a file made by `hsprobe noise`.

    Raises:
        DifferentError: they differ; the message names the fault, its evidence and its mend.
        HsprobeError: they cannot be compared.
    """
    __tracebackhide__ = True
    from hsprobe.cluster.processes import ProcessEngine
    from hsprobe.compare.engine import using
    from hsprobe.diagnose import diff
    from hsprobe.report.terminal import text

    train, infer = locate(train), locate(infer)
    with ProcessEngine(given=(train, infer)) as engine, using(engine):
        report = diff(train, infer, noise=noise)
    if not report.same:
        raise DifferentError(f"the traces differ\n{text(report)}", report)


def assert_draft_sees(
    train: Location | str, server: Location | str | Captures, *, max_new_tokens: int = NEW_TOKENS
) -> None:
    """Check that a server hands its draft what the draft was trained on.

    Args:
        train: the training dump as its producer wrote it, or a trace of it or of the whole model.
        server: the fixture `hsprobe_server`, the URL of a server started with HSPROBE_CAPTURE=1, or a trace
            that was captured before. A server is sent the prompts of `train`, of a dump its first samples.
        max_new_tokens: tokens to generate for each prompt, which is what the draft takes part in.

    Raises:
        DifferentError: it does not; as `assert_traces_match`.
        HsprobeError: nothing could be captured, or compared.
    """
    __tracebackhide__ = True
    if isinstance(server, Location) or (
        isinstance(server, str) and not server.startswith(("http://", "https://"))
    ):
        assert_traces_match(train, server)
        return
    with tempfile.TemporaryDirectory(prefix="hsprobe-") as folder:
        out = Path(folder) / "infer.h5"
        prompts = _prompts_of(locate(train), Path(folder))
        if isinstance(server, str):
            from hsprobe.capture.hold import capture_running

            capture_running(server, out, prompts, max_new_tokens=max_new_tokens)
        else:
            server.capture(out, prompts, max_new_tokens=max_new_tokens)
        assert_traces_match(train, out)


def _prompts_of(train: Location, folder: Path) -> Location:
    """What to send: the prompts of a trace, or the first samples of a dump, which may have very many."""
    from hsprobe.formats.registry import is_trace

    if is_trace(train):
        return train
    from hsprobe.capture.prompts import load_prompts

    lines = [json.dumps(prompt.payload()) for prompt in load_prompts(train, DUMP_PROMPTS)]
    prompts = folder / "prompts.jsonl"
    prompts.write_text("\n".join(lines))
    return prompts


def assert_layers(infer: Location | str, ids: Sequence[int]) -> None:
    """Check that the draft is handed the layers that these ids ask for, told from the tensors themselves.

    Args:
        infer: trace of a server, with sites aux and layer.
        ids: as written in `eagle_aux_hidden_state_layer_ids`, read by the rule of the model's class.

    Raises:
        DifferentError: a chunk carries another depth; the message names it.
        HsprobeError: the capture cannot tell.
    """
    __tracebackhide__ = True
    from hsprobe.diagnose.layers import check_layers

    lines = check_layers(infer, ids)
    if lines:
        raise DifferentError("\n".join(lines))


def assert_matches_baseline(infer: Location | str, baseline: Path | str, *, update: bool = False) -> None:
    """Check a capture against a sketch of an earlier one; what a sketch can detect is in `docs/ci.md`.

    Args:
        infer: trace of a server.
        baseline: the sketch's file. update: write it instead, and accept what there is.

    Raises:
        DifferentError: a chunk changed; the message says which, and where its states are now.
        HsprobeError: there is no baseline, or nothing could be compared.
    """
    __tracebackhide__ = True
    from hsprobe.compare import sketch
    from hsprobe.diagnose.baseline import against_baseline, change_lines

    if update:
        sketch.save(sketch.sketch(infer), Path(baseline))
        return
    changes = against_baseline(sketch.load(Path(baseline)), infer)
    if not all(change.same for change in changes):
        raise DifferentError("\n".join(change_lines(changes)))
