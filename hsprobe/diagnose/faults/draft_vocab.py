"""The draft's tokens are mapped wrongly to the target's."""

from __future__ import annotations

from hsprobe.diagnose.draft.findings import findings_of
from hsprobe.diagnose.evidence import Evidence
from hsprobe.diagnose.explanation import Explanation
from hsprobe.diagnose.model import Finding

RANK = 67
KIND = "vocab"
EXPLANATION = Explanation(
    code="HS808",
    name="DRAFT_VOCAB",
    summary="draft ids are mapped to other target ids than the checkpoint's d2t says",
    symptom="The acceptance length is 1.00, or that of chance, though the draft's logits are right.",
    cause=("d2t holds target ids where differences are meant, is missing, or belongs to another vocabulary."),
    evidence=(
        "With the draft's checkpoint given: the token proposed is compared with the one that d2t gives for "
        "the best captured logit."
    ),
    mend="Store d2t as target id minus draft id, in the checkpoint that is served.",
)


def diagnose(evidence: Evidence, explained: frozenset[int]) -> list[Finding]:
    """A finding for each verdict of this kind."""
    return findings_of(KIND, evidence.draft, EXPLANATION, RANK)
