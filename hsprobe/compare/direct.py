"""Compare two blocks of columns over all their pairs, streaming, in memory that does not grow with rows.

Shapes: n rows of a block, H channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from hsprobe.compare.align import Pairs, pair, spread
from hsprobe.compare.stack import Depth, Rows, Stack
from hsprobe.compare.statistics import ErrorStats, Floats, channel_scale, finite_rows, row_errors

# Largest row error of each phase that still counts as equal; one figure stands for all phases.
Limits = float | Mapping[int, float]

# A comparison holds about eight blocks at once: what is read, converted, scaled, subtracted.
_BLOCK_BYTES = 2 << 20
_LEAST_BLOCK_ROWS = 64
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

    def of(self, block_nW: Floats) -> Floats:
        """This lane's columns of a block of the whole stack. [n, W] -> [n, H]."""
        if self.chunk is None:
            return block_nW
        return np.ascontiguousarray(block_nW[:, self.chunk * self.width : (self.chunk + 1) * self.width])

    def scale(self, rows: Rows | None = None) -> Floats:
        """Robust channel magnitudes from an even sample of the usable rows. -> [H]."""
        usable = self.stack.keys.usable if rows is None else np.unique(rows)
        return channel_scale(self.of(self.stack.read(spread(usable, self.stack.keys, _SCALE_ROWS))))


@dataclass
class Direct:
    """All pairs of two lanes, summarised.

    Attributes:
        by_phase: phase code -> summary of the row errors.
        left_nonfinite, right_nonfinite: rows with NaN or Inf on either side.
        first_nonfinite: a row of the left stack where either side is not finite, -1 if none.
    """

    by_phase: dict[int, ErrorStats] = field(default_factory=dict)
    left_nonfinite: int = 0
    right_nonfinite: int = 0
    first_nonfinite: int = -1

    @property
    def total(self) -> ErrorStats:
        merged = ErrorStats()
        for stats in self.by_phase.values():
            merged = merged.merge(stats)
        return merged

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


def blocks(rows: int, width: int) -> Iterator[slice]:
    """Slices over `rows` rows, each a bounded number of bytes at this width."""
    step = max(_LEAST_BLOCK_ROWS, _BLOCK_BYTES // (4 * max(width, 1)))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def compare(left: Lane, right: Lane, limit: Limits, pairs: Pairs | None = None) -> Direct:
    """Errors of `left` (served) against `right` (reference) over all pairs.

    Args:
        limit: rows with a larger error are counted apart.
    """
    return compare_many([(left, right, limit)], pairs)[0]


def compare_many(jobs: list[tuple[Lane, Lane, Limits]], pairs: Pairs | None = None) -> list[Direct]:
    """As `compare`, for lanes of the same two stacks, reading each stack once."""
    left, right = jobs[0][0].stack, jobs[0][1].stack
    found = pair(left, right) if pairs is None else pairs
    results = [Direct() for _ in jobs]
    if not len(found):
        return results
    scales = [np.maximum(a.scale(found.left), b.scale(found.right)) for a, b, _ in jobs]
    for part in blocks(len(found), max(left.width, right.width)):
        rows = found.left[part]
        left_nW, right_nW = left.read(rows), right.read(found.right[part])
        for (a, b, limit), scale, result in zip(jobs, scales, results, strict=True):
            _add(result, a.of(left_nW), b.of(right_nW), scale, limit, rows, (left, right))
    return results


def _add(
    result: Direct,
    a_nH: Floats,
    b_nH: Floats,
    scale: Floats,
    limit: Limits,
    rows: Rows,
    stacks: tuple[Stack, Stack],
) -> None:
    errors = row_errors(a_nH, b_nH, scale)
    bad = ~np.isfinite(errors)
    if bad.any():
        result.left_nonfinite += int(np.count_nonzero(~finite_rows(a_nH)))
        result.right_nonfinite += int(np.count_nonzero(~finite_rows(b_nH)))
        if result.first_nonfinite < 0:
            result.first_nonfinite = int(rows[np.argmax(bad)])
    phases = stacks[0].keys.phase[rows]
    routed = any(stack.routed for stack in stacks)
    for phase in np.unique(phases):
        inside = phases == phase
        most = limit[int(phase)] if isinstance(limit, Mapping) else limit
        stats = result.by_phase.setdefault(int(phase), ErrorStats(routed=routed))
        stats.add(errors[inside], most, rows[inside])
