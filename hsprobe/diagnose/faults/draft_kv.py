"""The draft's keys are stale after a prefix hit."""

from __future__ import annotations

from hsprobe.diagnose.draft.findings import findings_of
from hsprobe.diagnose.evidence import Evidence
from hsprobe.diagnose.explanation import Explanation
from hsprobe.diagnose.model import Finding

RANK = 68
KIND = "kv"
EXPLANATION = Explanation(
    code="HS810",
    name="DRAFT_KV",
    summary="after a prefix hit the draft attends over keys that do not belong to the request",
    symptom="Acceptance is lower with the prefix cache than without, or falls while the server runs.",
    cause=(
        "A draft's key depends on the next token as well: a cache that looks up single tokens hands on a "
        "last key computed with another one, or keys that the draft never wrote."
    ),
    evidence=(
        "With the draft's checkpoint given: the attention of rows behind a prefix hit equals the captured "
        "one with the last cached key computed with another next token, or zero."
    ),
    mend=(
        "Key the prefix cache by pairs of tokens, or compute the last cached slot again; --disable-radix- "
        "cache shows what it costs."
    ),
)


def diagnose(evidence: Evidence, explained: frozenset[int]) -> list[Finding]:
    """A finding for each verdict of this kind."""
    return findings_of(KIND, evidence.draft, EXPLANATION, RANK)
