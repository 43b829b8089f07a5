"""Rows hold the state of a neighbouring position of the same request."""

from __future__ import annotations

from hsprobe.diagnose.aspects import Group, row_findings
from hsprobe.diagnose.evidence import Evidence
from hsprobe.diagnose.explanation import Explanation
from hsprobe.diagnose.model import Finding
from hsprobe.diagnose.naming import plural
from hsprobe.diagnose.origin import Kind

RANK = 17
EXPLANATION = Explanation(
    code="HS301",
    name="ROWS",
    summary="rows hold the states of a neighbouring position of the same request",
    symptom="Acceptance is about none, in the phases concerned.",
    cause=(
        "An index off by one when rows are selected, sliced or handed on, on the serving side; or a dump "
        "whose states were rolled against its token ids."
    ),
    evidence=(
        "For one offset of -2 to 2 the rows equal, up to rounding, the stream at that many positions from "
        "their own, in the same request; at their own position they do not."
    ),
    mend="Look at the index by which rows are taken: state p belongs to the token at position p.",
)


def diagnose(evidence: Evidence, explained: frozenset[int]) -> list[Finding]:
    """One finding a side."""
    return row_findings(evidence, EXPLANATION, RANK, (Kind.OFFSET,), _title)


def _title(group: Group) -> str:
    offset = next(part.origin.offset for part in group.parts if part.origin is not None)
    place = f"{plural(abs(offset), 'position')} {'before' if offset < 0 else 'after'} their own"
    return f"rows of {group.subject} hold the states {place}"
