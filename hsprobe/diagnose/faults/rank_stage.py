"""Layers that only another pipeline stage computes are missing where the draft is fed."""

from __future__ import annotations

from hsprobe.diagnose.evidence import Evidence
from hsprobe.diagnose.explanation import Explanation
from hsprobe.diagnose.model import Finding
from hsprobe.diagnose.naming import depth_name, listed
from hsprobe.diagnose.ranks.facts import RankFacts, Stages

RANK = 10
EXPLANATION = Explanation(
    code="HS707",
    name="PP_STAGE",
    summary="chunks of layers that an earlier pipeline stage computes are missing where the draft is fed",
    symptom="A shape error in the draft's fc, or an acceptance length of about one where nothing checks.",
    cause=(
        "Only the last pipeline stage captures layers for the draft; those of earlier stages are dropped "
        "and not "
        "sent along."
    ),
    evidence=(
        "The rank that feeds the draft hands over fewer chunks than were asked for, and the depths that are "
        "missing "
        "were recorded on another stage alone. Depths that lie on several stages and together cover the "
        "model are "
        "no fault."
    ),
    mend=(
        "Serve with --pp-size 1, train on depths of the last stage, or send the captured states along with "
        "the "
        "hidden states between stages."
    ),
)


def diagnose(evidence: Evidence, explained: frozenset[int]) -> list[Finding]:
    """One finding. It accounts for all chunks: after a gap every place is another's."""
    if evidence.trained_chunks == evidence.served_chunks:
        return []
    chunks = [line.index for line in evidence.lines]
    trained = [depth for depth in evidence.trained_depths if isinstance(depth, int)]
    found = []
    for facts in evidence.ranks:
        if facts.side == "infer" and facts.stages is not None:
            found += _findings(facts.stages, facts.stages.missing or _unseen(facts.stages, trained), chunks)
    return found


def of_ranks(facts: RankFacts) -> list[Finding]:
    """From what is known of the ranks alone."""
    return [] if facts.stages is None else _findings(facts.stages, facts.stages.missing, [])


def _unseen(stages: Stages, depths: list[int]) -> list[int]:
    mine = stages.seen[-1][1]
    elsewhere = {depth for _, found in stages.seen[:-1] for depth in found}
    return [depth for depth in depths if depth in elsewhere and depth not in mine]


def _findings(stages: Stages, missing: list[int], chunks: list[int]) -> list[Finding]:
    if not missing:
        return []
    proof = [
        f"rank {member.index} (pp {member.pp}) saw depths {depths[0]} to {depths[-1]}"
        for member, depths in stages.seen
        if depths
    ]
    what = depth_name(missing[0]) if len(missing) == 1 else f"depths {listed(missing)}"
    return [
        EXPLANATION.finding(
            f"{stages.feeds.name}, which feeds the draft, lacks {what}: only earlier pipeline stages saw "
            f"{'it' if len(missing) == 1 else 'them'}",
            rank=RANK,
            confidence=1.0,
            evidence=proof,
            chunks=chunks,
        )
    ]
