"""Rows of one stack that stand for the same token in the same context: what was computed twice."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hsprobe.compare.align import Pairs
from hsprobe.compare.stack import RANK_SHIFT, Keys, Rows


class Way(NamedTuple):
    """How a row was computed: codes of `Phase` and `Launch`."""

    phase: int
    graph: int = 0


@dataclass(frozen=True)
class Repeats:
    """What a stack computed more than once.

    Attributes:
        pairs: (way of the later row, way of the row it is compared with) -> the pairs. All rows of a context
            are compared with one of them: the first of the first phase that it occurs in, so with prefill
            where there is one, and there with one that ran eagerly before one from a CUDA graph.
        rows, contexts, repeated: usable rows, distinct contexts in them, and how many of those occur again.
    """

    pairs: dict[tuple[Way, Way], Pairs]
    rows: int
    contexts: int
    repeated: int


def repeats(keys: Keys) -> Repeats:
    """Pair up the usable rows of equal context and input token, within each rank.

    Rows of the draft at equal contexts were fed equal tokens only where the continuation is the same. Ranks
    are kept apart because they may hold different parts of one state.
    """
    usable = keys.usable
    rank = keys.row[usable] >> RANK_SHIFT
    order = np.lexsort(
        (
            usable,
            keys.graph[usable],
            keys.phase[usable],
            keys.position[usable],
            keys.token[usable],
            keys.context[usable],
            rank,
        )
    )
    rows, rank = usable[order], rank[order]
    new = np.ones(len(rows), bool)
    for column in (rank, keys.context[rows], keys.token[rows], keys.position[rows]):
        new[1:] &= column[1:] == column[:-1]
    # So far: whether a row continues the group before it; now: whether it starts one.
    new[1:] = ~new[1:]
    group = np.cumsum(new) - 1
    base = rows[new][group]
    later, base, group = rows[~new], base[~new], group[~new]
    return Repeats(_by_ways(keys, later, base), len(rows), int(np.count_nonzero(new)), len(np.unique(group)))


def _by_ways(keys: Keys, later: Rows, base: Rows) -> dict[tuple[Way, Way], Pairs]:
    ascending = np.argsort(later, kind="stable")
    later, base = later[ascending], base[ascending]
    found: dict[tuple[Way, Way], Pairs] = {}
    for left, right in product(_ways(keys, later), _ways(keys, base)):
        both = _went(keys, later, left) & _went(keys, base, right)
        if both.any():
            found[left, right] = Pairs(later[both], base[both])
    return found


def _ways(keys: Keys, rows: Rows) -> list[Way]:
    known = np.unique(np.stack([keys.phase[rows], keys.graph[rows]]), axis=1)
    return [Way(*way) for way in known.T.tolist()]


def _went(keys: Keys, rows: Rows, way: Way) -> NDArray[np.bool_]:
    """Which rows were computed this way. [n] -> [n]"""
    went: NDArray[np.bool_] = (keys.phase[rows] == way.phase) & (keys.graph[rows] == way.graph)
    return went
