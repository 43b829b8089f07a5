"""Rows that only pad a batch are taken for tokens."""

from __future__ import annotations

from hsprobe.diagnose.evidence import Evidence
from hsprobe.diagnose.explanation import Explanation
from hsprobe.diagnose.model import Finding
from hsprobe.diagnose.ranks.facts import Padding, RankFacts
from hsprobe.diagnose.ranks.wording import whose

RANK = 15
EXPLANATION = Explanation(
    code="HS706",
    name="DP_PADDING",
    summary="rows of tokens hold the states of rows that only pad the batch",
    symptom="Acceptance falls when data-parallel ranks have unequal batches, where there are fewer tokens.",
    cause=(
        "DP attention pads every rank's rows to a common number before they are gathered; a slice with "
        "another "
        "rank's offset or length, or rows counted after padding, takes padding for tokens."
    ),
    evidence=(
        "Rows that are not their own token's state equal, up to rounding, the states that the same server "
        "computed "
        "in rows labelled as padding."
    ),
    mend=(
        "Look at how rows are sliced out of the gathered buffer: by each rank's own number of tokens, before "
        "padding, and its own offset. To confirm, serve without --enable-dp-attention."
    ),
)


def diagnose(evidence: Evidence, explained: frozenset[int]) -> list[Finding]:
    """One finding a rank."""
    return [finding for facts in evidence.ranks for finding in of_ranks(facts)]


def of_ranks(facts: RankFacts) -> list[Finding]:
    """From what is known of the ranks alone."""
    return [_finding(facts, found) for found in facts.paddings]


def _finding(facts: RankFacts, found: Padding) -> Finding:
    return EXPLANATION.finding(
        f"{found.member.name}: {found.rows:,} of {found.of:,} rows of {found.name}{whose(facts)} hold the "
        "states of "
        "padding rows",
        rank=RANK,
        confidence=1.0,
        evidence=[f"the first: {found.example}", "the rest of the rows were compared without them"],
        agree=found.rows,
        rows=found.of,
        tally="rows are padding",
    )
