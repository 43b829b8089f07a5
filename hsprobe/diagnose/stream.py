"""The residual stream of one side, seen from the rows of another tensor.

Shapes: n rows, H channels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hsprobe.compare.align import pair
from hsprobe.compare.direct import Lane
from hsprobe.compare.stack import Keys, Rows, Stack
from hsprobe.compare.statistics import Floats
from hsprobe.diagnose.forms import Around

_POSITION_BITS = 32


@dataclass(frozen=True)
class Stream:
    """States by depth, and the stream within layers.

    Attributes:
        states: depth -> lane. mids: layer -> lane, after its attention and before its MLP.
        noise: depth -> relative error of faithful states, seen from the tensor that is compared.
    """

    states: dict[int, Lane]
    mids: dict[int, Lane]
    noise: Callable[[int], float]

    @property
    def depths(self) -> list[int]:
        return sorted(self.states)


@dataclass
class View:
    """Some rows of a tensor, and their partners in the stream.

    Args:
        query: the tensor. rows: which of its rows, ascending. [n]
    """

    query: Stack
    rows: Rows
    _partners: dict[tuple[int, int], Rows] = field(default_factory=dict)

    def around(self, stream: Stream, depth: int, offset: int = 0) -> Around | None:
        """The stream around a depth, `offset` positions on in each row's own request; None without rows."""
        state = self.read(stream.states[depth], offset)
        if not np.isfinite(state[:, 0]).any():
            return None
        return Around(
            state,
            self._maybe(stream.states.get(depth - 1), offset),
            self._maybe(stream.mids.get(depth - 1), offset),
            self._maybe(stream.mids.get(depth), offset),
        )

    def read(self, lane: Lane, offset: int = 0) -> Floats:
        """Partners of the rows; NaN without one. -> [n, H]"""
        rows = self.partners(lane.stack, offset)
        out = np.full((len(rows), lane.width), np.nan, np.float32)
        there = rows >= 0
        if there.any():
            out[there] = lane.of(lane.stack.read(rows[there]))
        return out

    def _maybe(self, lane: Lane | None, offset: int) -> Floats | None:
        return None if lane is None else self.read(lane, offset)

    def partners(self, other: Stack, offset: int) -> Rows:
        """Row of the other tensor, `offset` positions on in the request; -1 without one. -> [n]"""
        key = (id(other.keys), offset)
        if key not in self._partners:
            self._partners[key] = self._find(other, offset)
        return self._partners[key]

    def _find(self, other: Stack, offset: int) -> Rows:
        if offset == 0:
            found = pair(self.query, other)
            return looked_up(found.left, found.right, self.rows)
        mine = self.query.keys
        wanted = places(mine, self.rows, offset)
        if self.query.side == other.side:
            return looked_up(*by_place(other.keys), wanted)
        # The other side numbers its requests its own way; the contexts at those places are the same.
        at = looked_up(*by_place(mine), wanted)
        contexts, rows = other.keys.by_context
        found_rows = looked_up(contexts, rows, mine.context[np.maximum(at, 0)])
        there: Rows = np.where(at >= 0, found_rows, -1)
        return there


def places(keys: Keys, rows: Rows, offset: int = 0) -> Rows:
    """One number for each row's request and position, `offset` positions on; -1 before the first. -> [n]"""
    position = keys.position[rows] + offset
    found: Rows = np.where(position < 0, -1, (keys.request[rows] << _POSITION_BITS) + position)
    return found


def by_place(keys: Keys) -> tuple[Rows, Rows]:
    """Distinct places of the usable rows, sorted, and the first row at each."""
    unique, first = np.unique(places(keys, keys.usable), return_index=True)
    return unique, keys.usable[first]


def looked_up(table: Rows | NDArray[np.uint64], values: Rows, wanted: Rows | NDArray[np.uint64]) -> Rows:
    """The value of each wanted key; -1 where the (sorted) table lacks it."""
    if not len(table):
        return np.full(len(wanted), -1, np.int64)
    at = np.minimum(np.searchsorted(table, wanted), len(table) - 1)
    found: Rows = np.where(table[at] == wanted, values[at], -1)
    return found
