"""What each row of a forward pass is, read from SGLang's ForwardBatch before the model runs.

Field meanings: ``sglang/srt/model_executor/forward_batch_info.py`` (0.5.23).
"""

import time
from dataclasses import dataclass
from typing import Any

import torch

from hsprobe.probes.sglang.placing import NotRecordable
from hsprobe.probes.sglang.spooling import Copy

PHASES = {
    "EXTEND": "prefill",
    "MIXED": "prefill",
    "SPLIT_PREFILL": "prefill",
    "DECODE": "decode",
    "TARGET_VERIFY": "verify",
    "DRAFT_EXTEND_V2": "draft_extend",
}


@dataclass(frozen=True)
class Pass:
    """One forward of one model on one rank.

    Attributes:
        number: counts the forwards of this process.
        nth: counts the forwards of this pass's model. Ranks that run the same forwards count alike, so that
            passes can be joined though no rank has talked to another.
        is_draft: the draft's pass rather than the target's.
        n_rows: rows in the batch before SGLang pads it in the forward.
        rids: the requests' ids, in batch order.
        req_rows: rows of each request; they lie one after the other.
    """

    number: int
    nth: int
    is_draft: bool
    phase: str
    mode: str
    n_rows: int
    rids: list[str]
    req_rows: list[int]
    ids: Copy
    positions: Copy

    def header(self) -> dict[str, Any]:
        """The pass as a spool record's header."""
        return {
            "pass": self.number,
            "nth": self.nth,
            "model": "draft" if self.is_draft else "target",
            "phase": self.phase,
            "mode": self.mode,
            "n_rows": self.n_rows,
            "rids": self.rids,
            "req_rows": self.req_rows,
            "time": time.time(),
            "graph": False,
        }


def _rows_per_request(batch: Any, phase: str, n_rows: int, n_requests: int) -> list[int]:
    if phase == "prefill":
        return [int(length) for length in batch.extend_seq_lens_cpu][:n_requests]
    return [n_rows // n_requests] * n_requests


def read_pass(number: int, nth: int, runner: Any, batch: Any) -> Pass | None:
    """Label a pass (see `Pass` for its numbers), or ``None`` for one without rows.

    Raises:
        NotRecordable: the batch is of a kind that hsprobe does not know.
    """
    mode = batch.forward_mode.name
    rids = [str(rid) for rid in batch.rids or ()]
    n_rows = int(batch.input_ids.shape[0])
    if mode == "IDLE" or not rids or n_rows == 0:
        return None
    if mode not in PHASES:
        raise NotRecordable(f"passes of mode {mode} are not understood")
    is_draft = bool(runner.is_draft_worker)
    phase = PHASES[mode]
    if is_draft and phase == "decode":
        phase = "draft_decode"
    return Pass(
        number=number,
        nth=nth,
        is_draft=is_draft,
        phase=phase,
        mode="NULL" if batch.capture_hidden_mode is None else batch.capture_hidden_mode.name,
        n_rows=n_rows,
        rids=rids,
        req_rows=_rows_per_request(batch, phase, n_rows, len(rids)),
        ids=Copy(batch.input_ids.to(torch.int64)),
        positions=Copy(batch.positions.to(torch.int64)),
    )
