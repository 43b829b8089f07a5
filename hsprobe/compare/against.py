"""Some rows of a stack against lanes of another one: plain data that any process can work on.

Shapes: n rows looked at, p pairs of them, J jobs (every query with every lane), W width of the other stack.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hsprobe.compare.align import Pairs
from hsprobe.compare.shards import Job, Shard, errors
from hsprobe.compare.stack import scales_of
from hsprobe.compare.statistics import Floats
from hsprobe.compare.tables import Held, Rows, Source, Tables


@dataclass(frozen=True)
class Against:
    """One such comparison.

    Attributes:
        left, rows: the table, and [n] the rows of it that are looked at.
        queries: columns and scale of each.
        right: the other table. lanes: columns of each lane.
        width: of its blocks; known: [W] its scale, None where it is to be taken from `sample`.
        sample: rows of it. pairs: p rows of either. phases: [p] uint8.
    """

    left: Source
    rows: Rows
    queries: tuple[tuple[tuple[int, int], Floats], ...]
    right: Source
    lanes: tuple[tuple[int, int], ...]
    width: int
    known: Floats | None
    sample: Rows
    pairs: Pairs
    phases: NDArray[np.uint8]


_tables: list[Tables] = []
_held: dict[tuple[Source, bytes], Held] = {}


def compared(item: Against) -> tuple[Floats, Floats]:
    """Row errors [J, p], and the scale of the other table [W].

    What was opened and read for it stays, for the next one.

    Raises:
        HsprobeError: a file is missing or damaged.
    """
    if not _tables:
        _tables.append(Tables())
    tables = _tables[0]
    key = item.left, item.rows.tobytes()
    if key not in _held:
        _held.clear()
        _held[key] = Held(item.rows, tables.of(item.left).read(item.rows))
    scale = item.known
    if scale is None:
        scale = scales_of(tables.of(item.right).read(item.sample), item.width)
    jobs = tuple(
        Job(query, lane, np.maximum(own, scale[slice(*lane)]), 0.0)
        for query, own in item.queries
        for lane in item.lanes
    )
    pairs = item.pairs
    return errors(Shard(_held[key], item.right, jobs, pairs.left, pairs.right, item.phases), tables), scale


@contextmanager
def lent(left: Source, held: Held, tables: Tables) -> Iterator[None]:
    """What this process has open and has read already serves for what it does itself of such comparisons."""
    _tables.insert(0, tables)
    _held[left, held.rows.tobytes()] = held
    try:
        yield
    finally:
        del _tables[0]
        _held.clear()
