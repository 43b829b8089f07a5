"""What each row of a forward pass is, read from SGLang's ForwardBatch before the model runs.

Field meanings: ``sglang/srt/model_executor/forward_batch_info.py`` (0.5.9 and 0.5.23).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hsprobe.probes.sglang.linking import ACCEPTED_ONLY, rids_of
from hsprobe.probes.sglang.placing import NotRecordable
from hsprobe.probes.sglang.sampling import Runs, Sampling

PHASES = {
    "EXTEND": "prefill",
    "MIXED": "prefill",
    "SPLIT_PREFILL": "prefill",
    "DECODE": "decode",
    "TARGET_VERIFY": "verify",
    ACCEPTED_ONLY: "draft_extend",
    "DRAFT_EXTEND_V2": "draft_extend",
}

UNIFORM = ("DECODE", "TARGET_VERIFY", "DRAFT_EXTEND_V2")
"""Modes of passes with equally many rows of each request."""


@dataclass(frozen=True, eq=False, slots=True)
class Form:
    """What the passes of one batch have in common, so that it is worked out and told once.

    Attributes:
        is_draft: the draft's pass rather than the target's.
        n_rows: rows in the batch before SGLang pads it in the forward.
        rids: the requests' ids, in batch order.
        req_rows: rows of each request; they lie one after the other.
        runs: the rows to record of each request; None for all rows of the pass.
    """

    is_draft: bool
    phase: str
    mode: str
    n_rows: int
    rids: list[str]
    req_rows: list[int]
    runs: Runs | None = None

    def header(self) -> dict[str, Any]:
        """For a spool record; requests without a row to record are not in it."""
        rids, req_rows, n_rows = self.rids, self.req_rows, self.n_rows
        if self.runs is not None:
            kept = [(rid, last - first) for rid, (first, last) in zip(rids, self.runs, strict=True)]
            rids = [rid for rid, rows in kept if rows]
            req_rows = [rows for _, rows in kept if rows]
            n_rows = sum(req_rows)
        return {
            "model": "draft" if self.is_draft else "target",
            "phase": self.phase,
            "mode": self.mode,
            "n_rows": n_rows,
            "rids": rids,
            "req_rows": req_rows,
        }

    def runs_of(self, rows: Any) -> Runs:
        """Rows to record, as [first, last) runs, of a tensor with all rows of the pass, or the "last"."""
        if rows == "last":
            if self.runs is None:
                return [(0, len(self.rids))]
            return [(i, i + 1) for i, (first, last) in enumerate(self.runs) if first < last]
        return [(0, self.n_rows)] if self.runs is None else self.runs


@dataclass(slots=True)
class Pass:
    """One forward of one model on one rank.

    Attributes:
        number: counts the forwards of this process.
        nth: counts the forwards of this pass's model. Ranks that run the same forwards count alike, so that
            passes can be joined though no rank has talked to another.
        ids, positions: [n_rows] the live tensors, good until the forward returns.
        graph: replayed from a CUDA graph. padded_rows: rows that such a graph has.
        emitted: its record is written. short: some of it found no room.
    """

    number: int
    nth: int
    form: Form
    ids: torch.Tensor | None
    positions: torch.Tensor
    graph: bool = False
    padded_rows: int = 0
    emitted: bool = False
    short: bool = False

    @property
    def phase(self) -> str:
        return self.form.phase

    def header(self) -> dict[str, Any]:
        """The pass as a spool record's header."""
        counts = {"pass": self.number, "nth": self.nth, "time": time.time(), "graph": self.graph}
        return {**counts, **self.form.header()}


class Labeller:
    """Labels passes; the steps of a batch that stays together have their form in common."""

    def __init__(self) -> None:
        self._known: dict[tuple[bool, str], tuple[list[Any], int, Any, Form]] = {}

    def forget(self) -> None:
        """What is to be recorded has changed."""
        self._known.clear()

    def read(
        self,
        number: int,
        nth: int,
        runner: Any,
        batch: Any,
        sampling: Sampling,
        requests: Sequence[Any] = (),
    ) -> Pass | None:
        """As `read_pass`."""
        positions = batch.positions
        key = runner.is_draft_worker, batch.forward_mode.name
        known = self._known.get(key)
        if known is not None:
            rids, n_rows, capture, form = known
            now = getattr(batch, "rids", None)
            if now is None:
                now = rids_of(batch, requests)
            if rids == now and n_rows == positions.size(0) and capture == batch.capture_hidden_mode:
                return Pass(number, nth, form, batch.input_ids, positions)
        labelled = read_pass(number, nth, runner, batch, sampling, requests)
        if labelled is not None and key[1] in UNIFORM:
            form, capture = labelled.form, batch.capture_hidden_mode
            self._known[key] = (form.rids, form.n_rows, capture, form)
        return labelled


def _rows_per_request(batch: Any, mode: str, n_rows: int, n_requests: int) -> list[int]:
    if mode in UNIFORM:
        return [n_rows // n_requests] * n_requests
    return [int(length) for length in batch.extend_seq_lens_cpu][:n_requests]


def read_pass(
    number: int,
    nth: int,
    runner: Any,
    batch: Any,
    sampling: Sampling | None = None,
    requests: Sequence[Any] = (),
) -> Pass | None:
    """Label a pass (see `Pass` for its numbers), or ``None`` for one without rows to record.

    Args:
        requests: of the scheduler's batch, see `rids_of`.

    Raises:
        NotRecordable: the batch is of a kind that hsprobe does not know.
    """
    mode, rids = batch.forward_mode.name, rids_of(batch, requests)
    n_rows = int(batch.positions.shape[0])
    if mode == "IDLE" or not rids or n_rows == 0:
        return None
    if mode not in PHASES:
        raise NotRecordable(f"passes of mode {mode} are not understood")
    is_draft = bool(runner.is_draft_worker)
    phase = PHASES[mode]
    if is_draft and phase == "decode":
        phase = "draft_decode"
    req_rows = _rows_per_request(batch, mode, n_rows, len(rids))
    runs = None if sampling is None else sampling.choose(phase, rids, req_rows)
    if runs is not None and all(first == last for first, last in runs):
        return None
    capture = "NULL" if batch.capture_hidden_mode is None else batch.capture_hidden_mode.name
    form = Form(is_draft, phase, capture, n_rows, rids, req_rows, runs)
    return Pass(number, nth, form, batch.input_ids, batch.positions)
