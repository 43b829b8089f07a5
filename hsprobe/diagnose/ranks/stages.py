"""Pipeline stages and parts of rows: what is no fault by itself, and what one stage alone has seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hsprobe.compare.ranks import Member
from hsprobe.compare.stack import Stack
from hsprobe.diagnose.aspects import numbers_of
from hsprobe.diagnose.model import Depth
from hsprobe.diagnose.naming import phase_name
from hsprobe.diagnose.ranks.facts import RankFacts, Stages

HANDED = ("aux", "draft.input")


def stages(
    members: Sequence[Member],
    stacks: Mapping[int, Mapping[str, Stack]],
    hidden: int,
    claimed: Sequence[Depth],
) -> Stages | None:
    """Which stage saw which depths; None with one stage.

    Args:
        claimed: depths that the server was asked for.
    """
    places = sorted({member.pp for member in members})
    if len(places) < 2:
        return None
    first = {pp: next(m for m in members if m.pp == pp) for pp in places}
    seen = [(first[pp], _depths(stacks[first[pp].number])) for pp in places]
    feeds, mine = seen[-1]
    handed = next((stacks[feeds.number][name] for name in HANDED if name in stacks[feeds.number]), None)
    chunks = handed.width // hidden if handed is not None else 0
    elsewhere = {depth for _, depths in seen[:-1] for depth in depths}
    missing = [d for d in claimed if isinstance(d, int) and d in elsewhere and d not in mine]
    short = handed is not None and chunks < len(claimed)
    return Stages(feeds, seen, missing if short else [])


def _depths(stacks: Mapping[str, Stack]) -> list[int]:
    return sorted(
        stack.depth
        for stack in stacks.values()
        if stack.tensor.site == "layer" and isinstance(stack.depth, int)
    )


def notes(facts: RankFacts) -> list[str]:
    """What is worth knowing and no fault."""
    found = []
    if facts.stages is not None and not facts.stages.missing:
        parts = [
            f"depths {depths[0]} to {depths[-1]} on rank {member.index} (pp {member.pp})"
            for member, depths in facts.stages.seen
            if depths
        ]
        if len(parts) > 1:
            found.append(f"The model runs in {len(facts.stages.seen)} pipeline stages: {', '.join(parts)}.")
    spread = {one.name: one for one in facts.scatters if not one.handed and not one.whole}
    if spread:
        first = min(spread)
        some = f"{first} and {len(spread) - 1} more" if len(spread) > 1 else first
        phases = numbers_of(phase_name(phase) for phase in spread[first].phases)
        where = f" in {phases}" if phases else ""
        found.append(f"Every rank holds a part of the rows of {some}{where}; together they hold all.")
    return found
