"""The draft sees more or fewer rows than in training."""

from __future__ import annotations

from hsprobe.diagnose.draft.findings import findings_of
from hsprobe.diagnose.evidence import Evidence
from hsprobe.diagnose.explanation import Explanation
from hsprobe.diagnose.model import Finding

RANK = 69
KIND = "mask"
EXPLANATION = Explanation(
    code="HS811",
    name="DRAFT_MASK",
    summary="the draft's attention sees more or fewer rows than it was trained with",
    symptom="Acceptance falls beyond a certain length, or is low throughout.",
    cause=(
        "A sliding window that training did not have, or one that is not applied; a causal mask that is "
        "missing; passes that do not see their prefix."
    ),
    evidence=(
        "With the draft's checkpoint given: the attention, computed from the captured queries, keys and "
        "values, equals the captured one under that window or mask."
    ),
    mend="Serve with the window that the draft was trained with (--speculative-draft-window-size).",
)


def diagnose(evidence: Evidence, explained: frozenset[int]) -> list[Finding]:
    """A finding for each verdict of this kind."""
    return findings_of(KIND, evidence.draft, EXPLANATION, RANK)
