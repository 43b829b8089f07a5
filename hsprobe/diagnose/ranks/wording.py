"""What several fault classes of ranks say alike."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hsprobe.compare.ranks import Member, names
from hsprobe.diagnose.model import LayerLine, RankLine, Ranks
from hsprobe.diagnose.naming import numbers
from hsprobe.diagnose.ranks.facts import RankComparison, RankFacts, SiteDifference
from hsprobe.diagnose.wording import figure


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


def each_of(members: Sequence[Member]) -> str:
    """`each of 2 ranks`, or the names of some."""
    return f"each of {len(members)} ranks" if len(members) == members[0].of else f"each of {names(members)}"


def summary(facts: RankFacts) -> str:
    """`2 ranks, equal bit for bit`; empty where there is one."""
    if not facts.several:
        return ""
    many = f"{len(facts.members)} ranks"
    if not facts.comparisons:
        return f"{many}, each with rows of its own"
    if facts.differing:
        differ = {found.member.number for found in facts.differing}
        return f"{many}, of which {len(differ)} {'differs' if len(differ) == 1 else 'differ'} from the others"
    if all(found.exact for found in facts.comparisons):
        return f"{many}, equal bit for bit"
    lines = [site.line for found in facts.comparisons for site in found.sites]
    worst = max(lines, key=_strain)
    return f"{many}, equal to {figure(worst.error)} (noise {figure(worst.noise)})"


def overview(facts: RankFacts) -> Ranks | None:
    """For a report; None of one rank."""
    if not facts.several:
        return None
    return Ranks(
        summary(facts), len(facts.members), [_line(found) for found in facts.comparisons if found.sites]
    )


def _line(found: RankComparison) -> RankLine:
    worst = max((site.line for site in found.sites), key=_strain)
    bad = found.bad
    member = found.member
    return RankLine(
        rank=member.index,
        against=found.against.index,
        tp=member.tp,
        pp=member.pp,
        dp=member.dp,
        sites=len(found.sites),
        differ=len(bad),
        rows=max(site.line.rows for site in found.sites),
        exact=found.exact,
        error=worst.error,
        noise=worst.noise,
        first=min(bad, key=lambda site: (site.place is None, site.place or 0)).site if bad else "",
    )


def _strain(line: LayerLine) -> float:
    return -1.0 if math.isnan(line.error) else line.error / line.noise
