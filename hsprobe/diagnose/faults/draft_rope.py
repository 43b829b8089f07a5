"""The draft rotates with another RoPE than it was trained with."""

from __future__ import annotations

from hsprobe.diagnose.draft.findings import findings_of
from hsprobe.diagnose.evidence import Evidence
from hsprobe.diagnose.explanation import Explanation
from hsprobe.diagnose.model import Finding

RANK = 65
KIND = "rope"
EXPLANATION = Explanation(
    code="HS806",
    name="DRAFT_ROPE",
    summary="the draft's RoPE has another base or scaling than it was trained with",
    symptom="Acceptance falls the longer the request is.",
    cause=(
        "rope_theta or rope_scaling of the served config.json is not that of training, is not read, or a "
        "table shared with the target is used."
    ),
    evidence=(
        "With the draft's checkpoint given: the attention, computed from the captured queries, keys and "
        "values, equals the captured one under another base or scaling."
    ),
    mend=(
        "Set rope_theta and rope_scaling in the config.json of the served draft to what training used, "
        "whatever the target has."
    ),
)


def diagnose(evidence: Evidence, explained: frozenset[int]) -> list[Finding]:
    """A finding for each verdict of this kind."""
    return findings_of(KIND, evidence.draft, EXPLANATION, RANK)
