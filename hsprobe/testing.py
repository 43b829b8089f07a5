"""Assertions for tests: the message is the finding."""

from __future__ import annotations

from pathlib import Path


def assert_traces_match(train: Path | str, infer: Path | str) -> None:
    """Check that a capture holds the hidden states that the draft was trained on.

    Args:
        train: trace of the training dump, or of the whole model.
        infer: trace of the running server.

    Raises:
        AssertionError: they differ; the message names the fault, its evidence and its mend.
        HsprobeError: they cannot be compared.
    """
    __tracebackhide__ = True
    from hsprobe.diagnose import diff
    from hsprobe.report.terminal import text

    report = diff(train, infer)
    if not report.same:
        raise AssertionError(f"the traces differ\n{text(report)}")
