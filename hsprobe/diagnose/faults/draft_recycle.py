"""A step of the draft is given another state than the one before it left."""

from __future__ import annotations

from hsprobe.diagnose.draft.findings import findings_of
from hsprobe.diagnose.evidence import Evidence
from hsprobe.diagnose.explanation import Explanation
from hsprobe.diagnose.model import Finding

RANK = 62
KIND = "recycle"
EXPLANATION = Explanation(
    code="HS803",
    name="DRAFT_RECYCLE",
    summary="a step of a chain is given another state than the draft was trained to take",
    symptom="The first drafted token is accepted as often as in training, later ones are not.",
    cause=(
        "norm_output of the served config.json is not that of training; or the state before, that of "
        "another row, or the target's is handed on."
    ),
    evidence=(
        "With the draft's checkpoint given: what each step is given is compared with every state that the "
        "row before it computed, and with those of the rows beside it."
    ),
    mend=(
        "Set norm_output in the config.json of the served draft; training and serving have to hand on the "
        "state before the norm alike, or after it."
    ),
)


def diagnose(evidence: Evidence, explained: frozenset[int]) -> list[Finding]:
    """A finding for each verdict of this kind."""
    return findings_of(KIND, evidence.draft, EXPLANATION, RANK)
