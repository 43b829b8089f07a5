"""The draft's tokens are shifted against the states that it takes."""

from __future__ import annotations

from hsprobe.diagnose.draft.findings import findings_of
from hsprobe.diagnose.evidence import Evidence
from hsprobe.diagnose.explanation import Explanation
from hsprobe.diagnose.model import Finding

RANK = 64
KIND = "tokens"
EXPLANATION = Explanation(
    code="HS805",
    name="DRAFT_TOKENS",
    summary="the token that a row of the draft is fed does not follow the state it takes",
    symptom="Acceptance is near one token; training looks normal.",
    cause=(
        "Row p of the draft takes the target's state at p and the token at p+1. The ids were not shifted, "
        "shifted twice, or the wrong way."
    ),
    evidence=(
        "With the draft's checkpoint given: the ids fed are compared with the tokens that follow in the "
        "request, and the captured embedding with that of the tokens beside it."
    ),
    mend="Shift the ids once, by one, and leave states and positions where they are.",
)


def diagnose(evidence: Evidence, explained: frozenset[int]) -> list[Finding]:
    """A finding for each verdict of this kind."""
    return findings_of(KIND, evidence.draft, EXPLANATION, RANK)
