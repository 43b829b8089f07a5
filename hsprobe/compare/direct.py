"""Compare two blocks of columns over all their pairs, streaming, in memory that does not grow with rows.

Shapes: n rows of a block, H channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hsprobe.compare.align import Pairs, pair
from hsprobe.compare.engine import current
from hsprobe.compare.shards import Direct, Job, Limits, Shard, cut, merge
from hsprobe.compare.shards import errors as shard_errors
from hsprobe.compare.stack import Depth, Rows, Stack
from hsprobe.compare.statistics import Floats
from hsprobe.compare.tables import Below, Source, Table, Tables


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
        """Robust channel magnitudes from a sample of the usable rows, or of these. -> [H]."""
        usable = self.stack.keys.usable if rows is None else np.unique(rows)
        return self.stack.scales(usable, self.width)[slice(*self.columns)]


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
    whole, tables = _whole(left, right, work, found)
    for part in current().run(cut(whole, left.row_bytes + right.row_bytes), tables):
        results = merge(results, part)
    return results


def errors(left: Lane, right: Lane, pairs: Pairs) -> Floats:
    """The row error of every pair, for a caller who needs each of them. -> [n]"""
    scale = np.maximum(left.scale(pairs.left), right.scale(pairs.right))
    job = Job(left.columns, right.columns, scale, 0.0)
    whole, tables = _whole(left.stack, right.stack, (job,), pairs)
    parts = cut(whole, left.stack.row_bytes + right.stack.row_bytes)
    found = [np.zeros(0, np.float32), *(shard_errors(part, tables)[0] for part in parts)]
    return np.concatenate(found)


def errors_between(
    left: Table, right: Stack, jobs: tuple[Job, ...], pairs: Pairs, phases: NDArray[np.uint8]
) -> Floats:
    """The row errors of every pair and job, here and now. -> [J, n]"""
    source = right.source
    tables = Tables() if source is None else Tables({source: Below(right.pieces)})
    other = right if source is None else source
    return shard_errors(Shard(left, other, jobs, pairs.left, pairs.right, phases), tables)


def _whole(left: Stack, right: Stack, jobs: tuple[Job, ...], pairs: Pairs) -> tuple[Shard, Tables]:
    """A comparison as one shard, and the tables that are open already."""
    lent: dict[Source, Table] = {}
    sides: list[Source | Table] = []
    for stack in (left, right):
        source = stack.source
        if source is not None:
            lent[source] = Below(stack.pieces)
        sides.append(stack if source is None else source)
    phases = left.keys.phase[pairs.left]
    routed = left.routed or right.routed
    return Shard(sides[0], sides[1], jobs, pairs.left, pairs.right, phases, routed), Tables(lent)
