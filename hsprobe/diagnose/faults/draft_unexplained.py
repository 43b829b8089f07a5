"""A stage of the draft differs and nothing that was tried explains it."""

from __future__ import annotations

from hsprobe.diagnose.draft.findings import findings_of
from hsprobe.diagnose.evidence import Evidence
from hsprobe.diagnose.explanation import Explanation
from hsprobe.diagnose.model import Finding

RANK = 91
KIND = "unexplained"
EXPLANATION = Explanation(
    code="HS899",
    name="DRAFT_UNEXPLAINED",
    summary="a stage of the draft differs from its checkpoint in a way that no other class accounts for",
    symptom="Acceptance is down, by any amount.",
    cause="Not known. The finding names the first stage that differs instead of guessing.",
    evidence=(
        "With the draft's checkpoint given: every stage is computed from what was captured before it, so "
        "the first that differs is where the fault lies."
    ),
    mend="Look at what llama_eagle3.py does between the stage before and this one.",
)


def diagnose(evidence: Evidence, explained: frozenset[int]) -> list[Finding]:
    """A finding for each verdict of this kind."""
    return findings_of(KIND, evidence.draft, EXPLANATION, RANK)
