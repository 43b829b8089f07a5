"""Compare two blocks of columns over all their pairs, streaming, in memory that does not grow with rows.

Shapes: n rows of a block, H channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hsprobe.compare.align import Pairs, pair, spread
from hsprobe.compare.engine import current
from hsprobe.compare.shards import Direct, Job, Limits, Shard, cut, merge
from hsprobe.compare.stack import Depth, Rows, Stack
from hsprobe.compare.statistics import Floats, channel_scale
from hsprobe.compare.tables import Source, Table, Tables

_SCALE_ROWS = 256


@dataclass(frozen=True)
class Lane:
    """H columns of a stack: all of them, or one chunk.

    Attributes:
        chunk: which chunk, None for a tensor that has no chunks.
        depth: what the producer says it is.
    """

    stack: Stack
    width: int
    chunk: int | None = None
    depth: Depth = None

    @property
    def columns(self) -> tuple[int, int]:
        """(first, end) of its columns in the stack."""
        if self.chunk is None:
            return 0, self.stack.width
        return self.chunk * self.width, (self.chunk + 1) * self.width

    def of(self, block_nW: Floats) -> Floats:
        """This lane's columns of a block of the whole stack. [n, W] -> [n, H]."""
        return block_nW if self.chunk is None else np.ascontiguousarray(block_nW[:, slice(*self.columns)])

    def scale(self, rows: Rows | None = None) -> Floats:
        """Robust channel magnitudes from an even sample of the usable rows. -> [H]."""
        usable = self.stack.keys.usable if rows is None else np.unique(rows)
        return channel_scale(self.of(self.stack.read(spread(usable, self.stack.keys, _SCALE_ROWS))))


def compare(left: Lane, right: Lane, limit: Limits, pairs: Pairs | None = None) -> Direct:
    """Errors of `left` (served) against `right` (reference) over all pairs.

    Args:
        limit: rows with a larger error are counted apart.
    """
    return compare_many([(left, right, limit)], pairs)[0]


def compare_many(jobs: list[tuple[Lane, Lane, Limits]], pairs: Pairs | None = None) -> list[Direct]:
    """As `compare`, for lanes of the same two stacks, reading each stack once.

    The engine in use (see `engine`) works on it in shards.
    """
    left, right = jobs[0][0].stack, jobs[0][1].stack
    found = pair(left, right) if pairs is None else pairs
    results = [Direct() for _ in jobs]
    if not len(found):
        return results
    work = tuple(
        Job(a.columns, b.columns, np.maximum(a.scale(found.left), b.scale(found.right)), limits)
        for a, b, limits in jobs
    )
    lent: dict[Source, Table] = {}
    sides = []
    for stack in (left, right):
        source = stack.source
        if source is not None:
            lent[source] = stack
        sides.append(stack if source is None else source)
    phases = left.keys.phase[found.left]
    whole = Shard(sides[0], sides[1], work, found.left, found.right, phases, left.routed or right.routed)
    for part in current().run(cut(whole, left.row_bytes + right.row_bytes), Tables(lent)):
        results = merge(results, part)
    return results
