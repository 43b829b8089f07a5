"""What several fault classes of ranks say alike."""

from __future__ import annotations

from collections.abc import Sequence

from hsprobe.compare.ranks import Member, names
from hsprobe.diagnose.naming import numbers
from hsprobe.diagnose.ranks.facts import RankFacts, SiteDifference


def chunks_of(side: str, chunks: Sequence[int]) -> str:
    """`aux chunk 0`, `aux chunks 0 and 1`, `chunk 0 of the training dump`."""
    noun = f"{'chunk' if len(chunks) == 1 else 'chunks'} {numbers(list(chunks))}"
    return f"aux {noun}" if side == "infer" else f"{noun} of the training dump"


def whose(facts: RankFacts) -> str:
    """Nothing for the capture, a word for the dump."""
    return "" if facts.side == "infer" else " of TRAIN"


def part_of_model(site: SiteDifference, before: SiteDifference | None) -> str:
    """Which part of the model lies just before a place at which ranks differ.

    Args:
        before: the last place of the stream before it at which they agree, None where there is none.
    """
    place = site.place
    if place is None:
        return ""
    if place == 0:
        return "the embedding"
    near = before is not None and before.place == place - 1
    if place % 2:
        return f"the attention of layer {place // 2}"
    layer = place // 2 - 1
    return f"the MLP of layer {layer}" if near else f"layer {layer}"


def all_of(members: Sequence[Member]) -> str:
    """`all 2 ranks`, or the names of some."""
    return f"all {len(members)} ranks" if len(members) == members[0].of else names(members)
