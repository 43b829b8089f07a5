"""The draft embeds its tokens with another table than it was trained with."""

from __future__ import annotations

from hsprobe.diagnose.draft.findings import findings_of
from hsprobe.diagnose.evidence import Evidence
from hsprobe.diagnose.explanation import Explanation
from hsprobe.diagnose.model import Finding

RANK = 63
KIND = "embed"
EXPLANATION = Explanation(
    code="HS804",
    name="DRAFT_EMBED",
    summary="the draft's token embedding is not the table that it was trained with",
    symptom="The target's states are right, and acceptance is low from the first drafted token on.",
    cause=(
        "SGLang shares the target's table and passes that of the checkpoint over; elsewhere the table is "
        "not tied, or not loaded."
    ),
    evidence=(
        "With the draft's checkpoint given: the captured embedding of each token against the target's "
        "table, the checkpoint's own, and zero. A table that is none of these still gives equal tokens "
        "equal vectors."
    ),
    mend="Train with the table that is served: the target's, frozen.",
)


def diagnose(evidence: Evidence, explained: frozenset[int]) -> list[Finding]:
    """A finding for each verdict of this kind."""
    return findings_of(KIND, evidence.draft, EXPLANATION, RANK)
