"""Columns of a state that are spread over ranks: not joined, or joined in another order."""

from __future__ import annotations

import math

from hsprobe.compare.ranks import names
from hsprobe.diagnose.evidence import Evidence
from hsprobe.diagnose.explanation import Explanation
from hsprobe.diagnose.model import Finding, Mend
from hsprobe.diagnose.naming import listed
from hsprobe.diagnose.ranks.facts import RankFacts, WidthShards
from hsprobe.diagnose.ranks.wording import each_of, whose
from hsprobe.diagnose.wording import figure

RANK = 11
_SHOWN = 8
EXPLANATION = Explanation(
    code="HS702",
    name="WIDTH_SHARD",
    summary="a rank holds some columns of each state only, or such columns were joined in another order",
    symptom=(
        "A shape error in the draft's fc; or, where widths happen to agree or the columns were joined "
        "wrongly, "
        "an acceptance length of about one."
    ),
    cause=(
        "A tensor that is split over tensor parallel ranks by columns is handed over without a gather, or "
        "gathered along the wrong axis: all chunks of rank 0, then all of rank 1, where each chunk has to be "
        "joined by itself."
    ),
    evidence=(
        "The tensor is the hidden size over the number of ranks wide, or its blocks of so many columns are, "
        "one "
        "by one, blocks of the server's own states (or of the trained ones) at other places. Every block is "
        "compared with every other."
    ),
    mend="Gather over the tensor parallel group, chunk by chunk, in the order of the ranks.",
)


def diagnose(evidence: Evidence, explained: frozenset[int]) -> list[Finding]:
    """One finding a tensor."""
    return [finding for facts in evidence.ranks for finding in of_ranks(facts)]


def of_ranks(facts: RankFacts) -> list[Finding]:
    """From what is known of the ranks alone: what is handed to the draft; else what else is in shards."""
    handed = [found for found in facts.shards if found.name in ("aux", "draft.input")]
    first = next((found.name for found in handed), None)
    chosen = [found for found in handed if found.name == first] or facts.shards[:1]
    return [_finding(facts, found) for found in chosen]


def _finding(facts: RankFacts, found: WidthShards) -> Finding:
    if found.joined:
        title = (
            f"{names(found.members)}: {found.name}{whose(facts)} is joined from shards of {found.width} "
            "columns "
            f"in the wrong order"
        )
    else:
        title = (
            f"{each_of(found.members)} holds {found.width} of the {found.hidden} columns of {found.name}"
            f"{whose(facts)}"
        )
    return EXPLANATION.finding(
        title,
        rank=RANK,
        confidence=1.0,
        evidence=_proof(found),
        mend=Mend(steps=[_step(found)]),
    )


def _proof(found: WidthShards) -> list[str]:
    if found.joined and found.order is not None:
        shown = listed(found.order[:_SHOWN]) + (", ..." if len(found.order) > _SHOWN else "")
        return [
            f"block by block it holds the right blocks {shown}: error {figure(found.error)}, as it is "
            f"{figure(found.before)}"
        ]
    if found.order is None:
        return ["in which order the shards join cannot be told: no state that they are part of was captured"]
    order = listed([found.members[k].index for k in found.order])
    straight = found.order == sorted(found.order)
    proof = [
        f"joined in the order {'of the ranks' if straight else f'{order} of the ranks'} they are the "
        "states: error "
        f"{figure(found.error)}"
    ]
    if not straight and not math.isnan(found.before):
        proof.append(f"in the order of the ranks they are not: error {figure(found.before)}")
    proof.append("each rank's part of the draft is fed that rank's own columns")
    return proof


def _step(found: WidthShards) -> str:
    if found.joined:
        return (
            "Look at the gather: join the shards of each chunk by themselves, in the order of the ranks "
            "(all_gather along the last axis of each chunk, not of all chunks in one)."
        )
    return f"Gather {found.name} over the tensor parallel group along its last axis, chunk by chunk."
