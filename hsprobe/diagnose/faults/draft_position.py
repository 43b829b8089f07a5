"""The draft's RoPE positions are off in some rows, or end too early."""

from __future__ import annotations

from hsprobe.diagnose.draft.findings import findings_of
from hsprobe.diagnose.evidence import Evidence
from hsprobe.diagnose.explanation import Explanation
from hsprobe.diagnose.model import Finding

RANK = 66
KIND = "position"
EXPLANATION = Explanation(
    code="HS807",
    name="DRAFT_POSITION",
    summary="the draft's RoPE positions are off in some of its rows, or end before the request does",
    symptom="Later drafted tokens are accepted less, or acceptance falls at a certain length.",
    cause=(
        "Positions are not advanced from step to step as in training, are advanced once too often, or the "
        "table of rotations ends at a max_position_embeddings copied from a template."
    ),
    evidence=(
        "The positions given are compared with the rows' places in the request. With the draft's checkpoint "
        "given, the attention is computed under offsets by phase and under every limit that the differing "
        "rows suggest. The same offset in all rows changes nothing and is not reported."
    ),
    mend=(
        "Give each row the position of the state it takes, one more for each step; set "
        "max_position_embeddings to the longest request."
    ),
)


def diagnose(evidence: Evidence, explained: frozenset[int]) -> list[Finding]:
    """A finding for each verdict of this kind."""
    return findings_of(KIND, evidence.draft, EXPLANATION, RANK)
