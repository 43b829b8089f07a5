"""One server gives the same tokens other states in another phase or pass."""

from __future__ import annotations

from hsprobe.diagnose.evidence import Evidence
from hsprobe.diagnose.explanation import Explanation
from hsprobe.diagnose.model import Finding

RANK = 60
EXPLANATION = Explanation(
    code="HS506",
    name="INCONSISTENT",
    summary="the server computes other states for the same tokens in another phase or pass",
    symptom=(
        "Acceptance depends on how a request is batched, cached or resumed; repeating a prompt changes it."
    ),
    cause=(
        "Decode or verify goes through another attention kernel or a recorded graph, or one pass leaves "
        "something behind for the next: a stale KV or prefix cache, a static buffer not refreshed."
    ),
    evidence=(
        "`hsprobe diff INFER` compares rows of one capture whose token ids up to and including their own "
        "are the same; the states differ by more than noise between phases or passes."
    ),
    mend=(
        "Begin with --disable-cuda-graph, --disable-radix-cache and another attention backend, one at a "
        "time, and compare again."
    ),
)


def diagnose(evidence: Evidence, explained: frozenset[int]) -> list[Finding]:
    """Nothing: two traces do not show it. `hsprobe.diagnose.inconsistency` finds it within one."""
    return []
