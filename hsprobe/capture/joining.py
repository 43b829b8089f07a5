"""Finds the same pass in several ranks, and says where one rank's differs or is missing.

Ranks do not talk to one another for this. Each counts the forwards of its target and of its draft, and
SGLang runs the same ones on every rank that shares tokens, so equal counts mean the same pass. The labels of
both are compared before that is believed: a rank that lost count, or lags, leaves a gap, never a partner.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from hsprobe.capture.rows import PassRows
from hsprobe.capture.segments import Gap, Segment
from hsprobe.trace.schema import Model

Found = tuple[int, Gap]
"""A gap, and the rank that has it."""
_MAX_RANKS = 1 << 16


def join_passes(segments: Sequence[Segment]) -> list[Found]:
    """Compare the passes of ranks that share tokens; marks those that contradict others as not joined.

    Args:
        segments: numbered (see `segments.number_ranks`).
    """
    groups: defaultdict[tuple[int, int], list[Segment]] = defaultdict(list)
    for segment in segments:
        if segment.passes:
            groups[segment.run, segment.coords.get("dp", 0)].append(segment)
    found: list[Found] = []
    for (_, dp), group in sorted(groups.items()):
        group.sort(key=lambda segment: segment.rank)
        found += _contradictions(group)
        for model in Model:
            found += _missing(group, model)
        found += _silent(group, dp)
    return found


def _contradictions(group: Sequence[Segment]) -> Iterator[Found]:
    first: dict[tuple[Model, int], tuple[int, PassRows]] = {}
    for segment in group:
        for one in segment.passes.values():
            rank, other = first.setdefault((one.model, one.nth), (segment.rank, one))
            differs = _difference(one, other)
            if differs is not None:
                segment.not_joined.add(one.number)
                what = f"a pass of the {one.model.name.lower()} has other {differs} than rank {rank}'s"
                yield segment.rank, Gap(f"{what}: it is joined with none", number=one.number)


def _difference(one: PassRows, other: PassRows) -> str | None:
    if one is other:
        return None
    if one.phase != other.phase:
        return f"work ({one.phase.name.lower()} against {other.phase.name.lower()})"
    if one.rids != other.rids or one.req_rows != other.req_rows:
        return "requests or rows"
    own = sum(one.req_rows)
    if not np.array_equal(one.positions[:own], other.positions[:own]):
        return "positions"
    if not np.array_equal(one.tokens[:own], other.tokens[:own]):
        return "token ids"
    return None


def _missing(group: Sequence[Segment], model: Model) -> Iterator[Found]:
    """Passes that a rank lacks. A draft runs on one pipeline stage only, a target on all."""
    recorded = {segment.rank: _numbers(segment.passes.values(), model) for segment in group}
    for segment in group:
        mine = recorded[segment.rank]
        for other in group:
            same_stage = segment.coords.get("pp", 0) == other.coords.get("pp", 0)
            lacking = recorded[other.rank] - mine
            if lacking and (model is Model.TARGET or same_stage):
                what = f"{len(lacking)} passes of the {model.name.lower()} that rank {other.rank} recorded"
                yield segment.rank, Gap(f"{what} are missing, the first of them {min(lacking)}")
                break


def _numbers(passes: Iterable[PassRows], model: Model) -> set[int]:
    return {one.nth for one in passes if one.model == model and one.kept().any()}


def _silent(group: Sequence[Segment], dp: int) -> Iterator[Found]:
    """Ranks that share tokens with these and recorded nothing."""
    hello = group[0].hello
    told = {name: hello.get(name) for name in ("world_size", "tp_size", "pp_size", "dp_size")}
    sizes = {name: size for name, size in told.items() if isinstance(size, int) and 0 < size <= _MAX_RANKS}
    if len(sizes) < len(told):
        return
    asked = hello.get("ranks")
    asked = asked if isinstance(asked, list) else None
    present = {segment.rank for segment in group}
    for rank in range(sizes["world_size"]):
        wanted = asked is None or rank in asked
        if wanted and rank not in present and _dp_of(rank, sizes) == dp:
            yield rank, Gap("the rank recorded no pass")
    for rank in asked or ():
        if isinstance(rank, int) and rank >= sizes["world_size"]:
            yield rank, Gap(f"the server has {sizes['world_size']} ranks, and none of this number")


def _dp_of(rank: int, sizes: dict[str, int]) -> int:
    tp, inside = sizes["tp_size"], sizes["tp_size"] * sizes["pp_size"]
    if sizes["world_size"] > inside:
        return rank // inside
    # Attention DP cuts the TP group itself.
    return rank % tp // max(1, tp // sizes["dp_size"])
