"""A weight of the draft is not the checkpoint's."""

from __future__ import annotations

from hsprobe.diagnose.draft.findings import findings_of
from hsprobe.diagnose.evidence import Evidence
from hsprobe.diagnose.explanation import Explanation
from hsprobe.diagnose.model import Finding

RANK = 60
KIND = "weights"
EXPLANATION = Explanation(
    code="HS809",
    name="DRAFT_WEIGHTS",
    summary=(
        "a weight of the served draft is not the checkpoint's: not loaded, transposed, exchanged or scaled"
    ),
    symptom="The target's states are right, and acceptance is near one token.",
    cause=(
        "A name that the loader does not know is passed over in silence; a matrix is stored with its axes "
        "exchanged; scales of a quantised one are lost."
    ),
    evidence=(
        "With the draft's checkpoint given: each matrix is tried alone, from what was captured before it to "
        "what was captured after it, with its values zero, transposed, exchanged or scaled by blocks; "
        "failing that, whether any matrix gives the outputs."
    ),
    mend=(
        "Look at the weight that is named: its name, shape, dtype and axes in the checkpoint that is served."
    ),
)


def diagnose(evidence: Evidence, explained: frozenset[int]) -> list[Finding]:
    """A finding for each verdict of this kind."""
    return findings_of(KIND, evidence.draft, EXPLANATION, RANK)
