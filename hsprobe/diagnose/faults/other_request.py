"""Rows belong to another request."""

from __future__ import annotations

from hsprobe.diagnose.aspects import Group, row_findings
from hsprobe.diagnose.evidence import Evidence
from hsprobe.diagnose.explanation import Explanation
from hsprobe.diagnose.model import Finding
from hsprobe.diagnose.origin import Kind

RANK = 18
EXPLANATION = Explanation(
    code="HS303",
    name="OTHER_REQUEST",
    summary="rows hold the states of other requests",
    symptom="Acceptance is right at batch size 1 and falls with the batch size; or training never learns.",
    cause=(
        "Rows of a batch are picked with the wrong stride or in another order than the requests; a dump's "
        "files are sorted as strings (req_10 before req_2), so that states and token ids of different "
        "samples meet."
    ),
    evidence=(
        "Each row's nearest row in the whole capture, by sketch and then exactly, is equal up to rounding "
        "and stands at another request's tokens."
    ),
    mend=(
        "Look at how rows are assigned to requests; in a dump, pair states and ids by request id and not "
        "by order."
    ),
)


def diagnose(evidence: Evidence, explained: frozenset[int]) -> list[Finding]:
    """One finding a side."""
    return row_findings(evidence, EXPLANATION, RANK, (Kind.REQUEST,), _title)


def _title(group: Group) -> str:
    return f"rows of {group.subject} hold the states of other requests"
