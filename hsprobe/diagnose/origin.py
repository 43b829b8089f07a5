"""Which rows stand where others should: each row's nearest in the whole tensor, and what they have in common.

Rows are found by sketches (random projections), so that no comparison grows with rows * rows * width; only
the nearest is then compared exactly.

Shapes: n rows asked about, N rows of the pool, H channels, S sketch width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from hsprobe.compare.direct import Lane
from hsprobe.compare.noise import ROW_ALLOWANCE
from hsprobe.compare.stack import Keys, Rows, Stack
from hsprobe.compare.statistics import Floats, finite_rows, row_errors
from hsprobe.compare.tables import blocks
from hsprobe.diagnose.stream import View, by_place, looked_up, places
from hsprobe.trace.reader import Trace

_SKETCH = 32
_RANK_SHIFT = 40
# Offsets within a request that are still called an offset.
_LARGEST_OFFSET = 2
_MOST, _HALF = 0.6, 0.5
_MIN_ROWS = 4


class Kind(Enum):
    """Where rows come from."""

    OFFSET = "another position of the same request"
    STALE = "an earlier pass"
    REPEATED = "one row repeated"
    ZERO = "nothing: zeros"
    REQUEST = "other requests"


@dataclass(frozen=True)
class Origin:
    """What the rows of a chunk have in common.

    Attributes:
        offset: positions from the row's own, for `OFFSET`.
        rows, of: rows found elsewhere, of those asked about.
        example: one row and where it comes from, in words.
    """

    kind: Kind
    offset: int = 0
    rows: int = 0
    of: int = 0
    example: str = ""


@dataclass(frozen=True)
class Source:
    """The rows asked about and the rows of the pool that they equal, -1 where none does. Each [n]."""

    rows: Rows
    found: Rows


def sources(query: Lane, rows: Rows, pool: Lane, noise: float) -> Source:
    """For each row of the query's stack the row of the pool that it equals up to noise."""
    mine = query.of(query.stack.read(rows))
    scale = np.maximum(query.scale(rows), pool.scale())
    rng = np.random.default_rng(0)
    projection = (rng.normal(size=(pool.width, _SKETCH)) / scale[:, None]).astype(np.float32)
    wanted = mine @ projection
    best = np.full(len(rows), np.inf, np.float32)
    found = np.full(len(rows), -1, np.int64)
    for part in blocks(pool.stack.rows, pool.stack.width):
        theirs = pool.of(pool.stack.read(np.arange(part.start, part.stop)))
        sketch = theirs @ projection
        sketch[~finite_rows(sketch)] = np.inf
        with np.errstate(invalid="ignore"):
            distance = _distances(wanted, sketch)
        distance[np.isnan(distance)] = np.inf
        nearest = np.argmin(distance, axis=1)
        value = distance[np.arange(len(rows)), nearest]
        closer = value < best
        best[closer], found[closer] = value[closer], nearest[closer] + part.start
    there = np.flatnonzero(found >= 0)
    errors = row_errors(mine[there], pool.of(pool.stack.read(found[there])), scale)
    found[there[~(errors <= ROW_ALLOWANCE * noise)]] = -1
    return Source(rows, found)


def _distances(a_nS: Floats, b_NS: Floats) -> Floats:
    """Squared distances. -> [n, N]"""
    squares: Floats = a_nS @ b_NS.T
    squares *= -2
    squares += np.sum(a_nS**2, axis=1)[:, None]
    squares += np.sum(b_NS**2, axis=1)[None, :]
    return squares


def zeros(query: Lane, rows: Rows) -> Origin | None:
    """Whether most of these rows hold nothing but zeros, as buffers do that were never written."""
    empty = ~np.any(query.of(query.stack.read(rows)), axis=1)
    count = int(np.count_nonzero(empty))
    return Origin(Kind.ZERO, rows=count, of=len(rows)) if count >= max(_MIN_ROWS, _HALF * len(rows)) else None


def origin(source: Source, query: Stack, pool: Stack, traces: Mapping[str, Trace]) -> Origin | None:
    """What the sources have in common; None where most rows have none, or are where they belong."""
    own = View(query, source.rows).partners(pool, 0)
    elsewhere = (source.found >= 0) & (source.found != own)
    rows, found = source.rows[elsewhere], source.found[elsewhere]
    moved, inside = _moves(query.keys, rows, pool.keys, found)
    # Equal contexts computed twice are equal rows: such a row is where it belongs.
    rows, found, moved, inside = (part[moved != 0] for part in (rows, found, moved, inside))
    if len(rows) < max(_MIN_ROWS, _HALF * len(source.rows)):
        return None
    same_side = query.side == pool.side
    if len(np.unique(found)) <= _HALF * len(found):
        kind, offset = Kind.REPEATED, 0
    else:
        kind, offset = _common(moved, inside, _stale(query, rows, pool, found, traces) if same_side else None)
    example = _example(query, rows, pool, found, traces, kind, offset, moved)
    return Origin(kind, offset, len(rows), len(source.rows), example)


def _moves(mine: Keys, rows: Rows, theirs: Keys, found: Rows) -> tuple[Rows, NDArray[np.bool_]]:
    """(positions from each row to its source in the same request, whether it is in the same request).

    By context, not by number: a request may have been computed twice, and each trace numbers anew.
    """
    offsets = theirs.position[found] - mine.position[rows]
    at = looked_up(*by_place(mine), places(mine, rows) + offsets)
    inside = (at >= 0) & (mine.context[np.maximum(at, 0)] == theirs.context[found])
    return np.where(inside, offsets, np.iinfo(np.int64).max), inside


def _stale(
    query: Stack, rows: Rows, pool: Stack, found: Rows, traces: Mapping[str, Trace]
) -> NDArray[np.bool_]:
    """Whether each source stands at the same place of the pass of the same kind just before."""
    trace = traces[query.side]
    _, q_index, q_before = _place_in_pass(query, rows, trace)
    f_pass, f_index, _ = _place_in_pass(pool, found, trace)
    stale: NDArray[np.bool_] = (f_pass == q_before) & (f_index == q_index)
    return stale


def _place_in_pass(stack: Stack, rows: Rows, trace: Trace) -> tuple[Rows, Rows, Rows]:
    """(pass of each row, its index there, the pass of the same model and phase before). Each [n]"""
    ids = stack.keys.row[rows]
    number, index = ids >> _RANK_SHIFT, ids & ((1 << _RANK_SHIFT) - 1)
    out = np.full((3, len(rows)), -1, np.int64)
    for rank in np.unique(number):
        table = trace.ranks[int(rank)]
        here = number == rank
        passes = np.asarray(table.rows["pass"], np.int64)
        starts = np.searchsorted(passes, np.arange(len(table.passes["id"])))
        kind = np.asarray(table.passes["phase"], np.int64) * 4 + np.asarray(table.passes["model"], np.int64)
        before = _before(kind)
        at = passes[index[here]]
        high = int(rank) << _RANK_SHIFT
        out[0, here], out[1, here] = at + high, index[here] - starts[at]
        out[2, here] = np.where(before[at] >= 0, before[at] + high, -1)
    return out[0], out[1], out[2]


def _before(kind: Rows) -> Rows:
    """For each pass the one of its kind before, -1 without one. -> [P]"""
    last: dict[int, int] = {}
    out = np.full(len(kind), -1, np.int64)
    for number, one in enumerate(kind.tolist()):
        out[number] = last.get(one, -1)
        last[one] = number
    return out


def _common(moves: Rows, same: NDArray[np.bool_], stale: NDArray[np.bool_] | None) -> tuple[Kind, int]:
    near = same & (np.abs(moves) <= _LARGEST_OFFSET)
    values, counts = np.unique(moves[near], return_counts=True)
    offset = int(values[np.argmax(counts)]) if len(values) else 0
    shifted = near & (moves == offset)
    if stale is not None and stale.mean() >= _MOST:
        # In a pass of one row a request, the pass before holds the position before: such rows do not tell.
        only_stale = np.count_nonzero(stale & ~shifted)
        if only_stale or not np.count_nonzero(shifted & ~stale):
            return Kind.STALE, 0
    if shifted.mean() >= _MOST:
        return Kind.OFFSET, offset
    if stale is not None and stale.mean() >= _HALF:
        return Kind.STALE, 0
    return Kind.REQUEST, 0


def _example(
    query: Stack,
    rows: Rows,
    pool: Stack,
    found: Rows,
    traces: Mapping[str, Trace],
    kind: Kind,
    offset: int,
    moves: Rows,
) -> str:
    at = int(np.argmax(moves == offset)) if kind is Kind.OFFSET else 0
    return (
        f"{_named(query, int(rows[at]), traces[query.side])} holds the state of "
        f"{_named(pool, int(found[at]), traces[pool.side])}"
    )


def _named(stack: Stack, row: int, trace: Trace) -> str:
    request = int(stack.keys.request[row])
    names = trace.requests.ids
    name = names[request] if 0 <= request < len(names) else "unknown"
    return f"request {name}, position {int(stack.keys.position[row])}"
