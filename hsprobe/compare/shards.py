"""The full comparison of two stacks cut into shards: plain data that any process can work on, in any order.

`cut` describes the work, `run` does one shard of it, `merge` puts two results together. Merging is
commutative and associative and an empty result changes nothing, so whoever runs the shards may split, order
and repeat them as it likes.

Shapes: n pairs of rows of a shard, W width of a stack, H of a job.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hsprobe.compare.cursor import Cursor
from hsprobe.compare.errors import RowErrors, Weights
from hsprobe.compare.statistics import ErrorStats, Floats, finite_rows
from hsprobe.compare.tables import Below, Rows, Source, Table, Tables
from hsprobe.trace.extents import TILE_BYTES
from hsprobe.trace.tensor import to_float32

# Blocks of fewer rows cost more in calls than they save in copies.
_LEAST_ROWS = 8
# Largest row error of each phase that still counts as equal; one figure stands for all phases.
Limits = float | Mapping[int, float]

SHARD_BYTES = 64 << 20
"""Aim for the values of one shard, both sides. It depends on nothing but the data: a journal relies on it."""


@dataclass(frozen=True)
class Job:
    """One comparison of a shard: some columns of either side.

    Attributes:
        left, right: (first, end) columns.
        scale: [H] float32, what each channel is divided by.
        limits: largest row error that still counts as equal.
    """

    left: tuple[int, int]
    right: tuple[int, int]
    scale: Floats
    limits: Limits


@dataclass(frozen=True)
class Shard:
    """Some pairs of rows of two tables, and what to compare of them.

    Attributes:
        left, right: the tables. One that is no `Source` is a view that lives in this process: see `portable`.
        left_rows, right_rows: [n] the pairs, ascending in the left. phases: [n] uint8, of the left rows.
        routed: whether rounding may have sent single rows to other experts, on either side.
    """

    left: Source | Table
    right: Source | Table
    jobs: tuple[Job, ...]
    left_rows: Rows
    right_rows: Rows
    phases: NDArray[np.uint8]
    routed: bool = False

    @property
    def portable(self) -> bool:
        """Whether it can be pickled and run by another process that reaches the same files."""
        return isinstance(self.left, Source) and isinstance(self.right, Source)


@dataclass
class Direct:
    """All pairs of two lanes, summarised.

    Attributes:
        by_phase: phase code -> summary of the row errors.
        left_nonfinite, right_nonfinite: rows with NaN or Inf on either side.
        first_nonfinite: the lowest row of the left stack where either side is not finite, -1 if none.
    """

    by_phase: dict[int, ErrorStats] = field(default_factory=dict)
    left_nonfinite: int = 0
    right_nonfinite: int = 0
    first_nonfinite: int = -1

    @property
    def total(self) -> ErrorStats:
        return reduce(ErrorStats.merge, self.by_phase.values(), ErrorStats())

    def merge(self, other: Direct) -> Direct:
        """The summary of both inputs, as if all pairs had been added to one."""
        phases = sorted({*self.by_phase, *other.by_phase})
        first = [row for row in (self.first_nonfinite, other.first_nonfinite) if row >= 0]
        return Direct(
            {
                p: self.by_phase.get(p, ErrorStats()).merge(other.by_phase.get(p, ErrorStats()))
                for p in phases
            },
            self.left_nonfinite + other.left_nonfinite,
            self.right_nonfinite + other.right_nonfinite,
            min(first, default=-1),
        )


def cut(whole: Shard, row_bytes: int, most: int = SHARD_BYTES) -> Iterator[Shard]:
    """A comparison in shards of at most so many bytes of values, in the order of the rows.

    Args:
        whole: all of it as one shard.
        row_bytes: stored bytes of one pair.
    """
    step = max(1, most // max(row_bytes, 1))
    for start in range(0, len(whole.left_rows), step):
        part = slice(start, start + step)
        yield Shard(
            whole.left,
            whole.right,
            whole.jobs,
            whole.left_rows[part],
            whole.right_rows[part],
            whole.phases[part],
            whole.routed,
        )


def run(shard: Shard, tables: Tables) -> list[Direct]:
    """One `Direct` for each job of a shard.

    Raises:
        HsprobeError: a file is missing or damaged.
    """
    errors_Jn, results = _errors(shard, tables)
    for job, errors, result in zip(shard.jobs, errors_Jn, results, strict=True):
        for phase in np.unique(shard.phases).tolist():
            inside = shard.phases == phase
            limit = job.limits[phase] if isinstance(job.limits, Mapping) else job.limits
            stats = result.by_phase.setdefault(phase, ErrorStats(routed=shard.routed))
            stats.add(errors[inside], limit, shard.left_rows[inside])
    return results


def errors(shard: Shard, tables: Tables) -> Floats:
    """The row errors themselves, for a caller who needs each of them. -> [J, n] for J jobs

    Raises:
        HsprobeError: a file is missing or damaged.
    """
    return _errors(shard, tables)[0]


def _errors(shard: Shard, tables: Tables) -> tuple[Floats, list[Direct]]:
    """Row errors [J, n], and for each job what there is to say of rows that are not finite."""
    sides = [_side(tables.of(table)) for table in (shard.left, shard.right)]
    results = [Direct() for _ in shard.jobs]
    weights = [Weights(job.scale) for job in shard.jobs]
    found = np.empty((len(shard.jobs), len(shard.left_rows)), np.float32)
    compute = RowErrors()
    for part in _parts(shard, sides):
        rows = shard.left_rows[part]
        for side, wanted in zip(sides, (rows, shard.right_rows[part]), strict=True):
            side.begin(wanted)
        for index, (job, weight, result) in enumerate(zip(shard.jobs, weights, results, strict=True)):
            a, b = sides[0].columns(job.left), sides[1].columns(job.right)
            here = compute.of(a, b, (sides[0].dtype, sides[1].dtype), weight)
            found[index, part] = here
            bad = np.isnan(here)
            if bad.any():
                result.left_nonfinite += int(np.count_nonzero(~finite_rows(to_float32(a, sides[0].dtype))))
                result.right_nonfinite += int(np.count_nonzero(~finite_rows(to_float32(b, sides[1].dtype))))
                if result.first_nonfinite < 0:
                    result.first_nonfinite = int(rows[np.argmax(bad)])
    return found, results


class _Side(Protocol):
    """Rows of a table in blocks."""

    dtype: str
    itemsize: int

    def begin(self, rows: Rows) -> None: ...

    def columns(self, columns: tuple[int, int]) -> NDArray[Any]: ...

    def tiles(self, rows: Rows) -> Rows: ...


class _Stored(Cursor):
    """Tensors."""

    def __init__(self, table: Below, dtype: str) -> None:
        super().__init__(table.layout)
        self.dtype = dtype
        self.itemsize = table.tensors[0].itemsize
        self.tiles = table.layout.tiles


class _View:
    """A view over some, which gives float32."""

    def __init__(self, table: Table) -> None:
        self.dtype = "float32"
        self.itemsize = 4
        self._table = table
        self._block = np.zeros((0, 0), np.float32)

    def begin(self, rows: Rows) -> None:
        self._block = self._table.read(rows)

    def columns(self, columns: tuple[int, int]) -> Floats:
        return self._block[:, slice(*columns)]

    def tiles(self, rows: Rows) -> Rows:
        """It has none of its own: any cut will do."""
        return np.zeros_like(rows)


def _side(table: Table) -> _Side:
    if isinstance(table, Below) and table.dtype is not None:
        return _Stored(table, table.dtype)
    return _View(table)


def _parts(shard: Shard, sides: Sequence[_Side]) -> list[slice]:
    """A shard in blocks that fit the cache, each within one tile of either side where that can be had."""
    count = len(shard.left_rows)
    widest = max(high - low for job in shard.jobs for low, high in (job.left, job.right))
    most = max(1, TILE_BYTES // max(1, widest * max(side.itemsize for side in sides)))
    tiles = [side.tiles(rows) for side, rows in zip(sides, (shard.left_rows, shard.right_rows), strict=True)]
    changes = np.flatnonzero((np.diff(tiles[0]) != 0) | (np.diff(tiles[1]) != 0)) + 1
    if len(changes) + 1 > count / _LEAST_ROWS and len(changes) + 1 > count / (most / 4):
        # Rows all over the place are better gathered, many at a time.
        changes, most = np.zeros(0, np.int64), 4 * most
    bounds = [0, *changes.tolist(), count]
    return [
        slice(start, min(start + most, high))
        for low, high in pairwise(bounds)
        for start in range(low, high, most)
    ]


def merge(one: Sequence[Direct], other: Sequence[Direct]) -> list[Direct]:
    """The results of two shards of one comparison, job by job."""
    return [a.merge(b) for a, b in zip(one, other, strict=True)]
