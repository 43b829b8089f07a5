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

import numpy as np
from numpy.typing import NDArray

from hsprobe.compare.statistics import ErrorStats, Floats, finite_rows, row_errors
from hsprobe.compare.tables import Rows, Source, Table, Tables, blocks

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
    left, right = tables.of(shard.left), tables.of(shard.right)
    results = [Direct() for _ in shard.jobs]
    for part in blocks(len(shard.left_rows), max(left.width, right.width)):
        left_nW, right_nW = left.read(shard.left_rows[part]), right.read(shard.right_rows[part])
        for job, result in zip(shard.jobs, results, strict=True):
            a, b = left_nW[:, slice(*job.left)], right_nW[:, slice(*job.right)]
            _add(result, np.ascontiguousarray(a), np.ascontiguousarray(b), job, shard, part)
    return results


def merge(one: Sequence[Direct], other: Sequence[Direct]) -> list[Direct]:
    """The results of two shards of one comparison, job by job."""
    return [a.merge(b) for a, b in zip(one, other, strict=True)]


def _add(result: Direct, a_nH: Floats, b_nH: Floats, job: Job, shard: Shard, part: slice) -> None:
    rows, phases = shard.left_rows[part], shard.phases[part]
    errors = row_errors(a_nH, b_nH, job.scale)
    bad = ~np.isfinite(errors)
    if bad.any():
        result.left_nonfinite += int(np.count_nonzero(~finite_rows(a_nH)))
        result.right_nonfinite += int(np.count_nonzero(~finite_rows(b_nH)))
        if result.first_nonfinite < 0:
            result.first_nonfinite = int(rows[np.argmax(bad)])
    for phase in np.unique(phases):
        inside = phases == phase
        most = job.limits[int(phase)] if isinstance(job.limits, Mapping) else job.limits
        stats = result.by_phase.setdefault(int(phase), ErrorStats(routed=shard.routed))
        stats.add(errors[inside], most, rows[inside])
