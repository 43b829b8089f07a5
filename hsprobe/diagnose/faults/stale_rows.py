"""Rows hold what an earlier pass left, one row over and over, or nothing."""

from __future__ import annotations

from hsprobe.diagnose.aspects import Group, row_findings
from hsprobe.diagnose.evidence import Evidence
from hsprobe.diagnose.explanation import Explanation
from hsprobe.diagnose.model import Finding
from hsprobe.diagnose.origin import Kind

RANK = 16
EXPLANATION = Explanation(
    code="HS302",
    name="STALE_ROWS",
    summary="rows hold an earlier pass's states, one row repeated, or zeros",
    symptom=(
        "Acceptance falls to 1.00, often in the middle of a run or above some batch size, and stays there."
    ),
    cause=(
        "A buffer is read that this pass did not write: a CUDA graph replayed with other buffers, a copy "
        "that covers only some rows, a result kept from the first call."
    ),
    evidence=(
        "The rows equal, up to rounding, the rows at the same places of the pass of their kind before; or "
        "many rows are one and the same row; or they are zero."
    ),
    mend=(
        "Make sure that the buffer the draft reads is the one this pass wrote, all rows of it; try "
        "--disable-cuda-graph and --disable-overlap-schedule to see which of them it comes with."
    ),
)


def diagnose(evidence: Evidence, explained: frozenset[int]) -> list[Finding]:
    """One finding a side."""
    return row_findings(evidence, EXPLANATION, RANK, (Kind.STALE, Kind.REPEATED, Kind.ZERO), _title)


def _title(group: Group) -> str:
    kind = next(part.origin.kind for part in group.parts if part.origin is not None)
    if kind is Kind.ZERO:
        return f"rows of {group.subject} hold nothing but zeros"
    if kind is Kind.STALE:
        return f"rows of {group.subject} hold the states of the pass before"
    if all(part.reading is None for part in group.parts):
        return f"{group.subject} {group.verb('holds', 'hold')} one and the same vector in every row"
    return f"{group.subject} {group.verb('holds', 'hold')} one row repeated"
