"""A norm inside the draft is missing, or one too many."""

from __future__ import annotations

from hsprobe.diagnose.draft.findings import findings_of
from hsprobe.diagnose.evidence import Evidence
from hsprobe.diagnose.explanation import Explanation
from hsprobe.diagnose.model import Finding

RANK = 61
KIND = "norm"
EXPLANATION = Explanation(
    code="HS802",
    name="DRAFT_NORM",
    summary="a norm inside the draft is not applied, or one is applied that it was not trained with",
    symptom="The target's states are right, the draft receives them, and acceptance is low all the same.",
    cause=(
        "norm_before_fc or fc_norm is not in the served config.json, so that the weights are passed over in "
        "silence; or a server applies norms of its own."
    ),
    evidence=(
        "With the draft's checkpoint given: the stage after the norm, computed from what was captured "
        "before it, equals the captured one without that norm (or with one more, or with another's gain) "
        "and not as the checkpoint has it."
    ),
    mend=(
        "Set norm_before_fc or fc_norm in the config.json of the served draft as its checkpoint was trained."
    ),
)


def diagnose(evidence: Evidence, explained: frozenset[int]) -> list[Finding]:
    """A finding for each verdict of this kind."""
    return findings_of(KIND, evidence.draft, EXPLANATION, RANK)
