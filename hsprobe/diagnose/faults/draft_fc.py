"""The draft's fc is passed by."""

from __future__ import annotations

from hsprobe.diagnose.draft.findings import findings_of
from hsprobe.diagnose.evidence import Evidence
from hsprobe.diagnose.explanation import Explanation
from hsprobe.diagnose.model import Finding

RANK = 12
KIND = "fc"
EXPLANATION = Explanation(
    code="HS801",
    name="DRAFT_FC",
    summary="the target's states go past the draft's fc",
    symptom="The acceptance length is 1.00 or little more, and nothing warns.",
    cause=(
        "SGLang runs fc only where the width of what it is handed differs from the draft's own: with "
        "--speculative-algorithm EAGLE, use_aux_hidden_state off, or a single chunk of the draft's width, "
        "it does not."
    ),
    evidence=(
        "With the draft's checkpoint given: states of the draft's own width are handed to it, fc takes "
        "another, and fc ran in none of these rows."
    ),
    mend=(
        "Serve with --speculative-algorithm EAGLE3 and use_aux_hidden_state on; give the draft more than "
        "one chunk."
    ),
)


def diagnose(evidence: Evidence, explained: frozenset[int]) -> list[Finding]:
    """A finding for each verdict of this kind."""
    return findings_of(KIND, evidence.draft, EXPLANATION, RANK)
