"""Which columns and which rows of a tensor a rank holds, where they are not those that its labels say.

Shapes: n rows, B blocks of columns, h width of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hsprobe.compare.direct import Lane
from hsprobe.compare.noise import MEDIAN_ALLOWANCE
from hsprobe.compare.stack import RANK_SHIFT, Rows, Stack, spread
from hsprobe.compare.statistics import Floats, channel_scale, finite_rows
from hsprobe.diagnose.account import errors_of
from hsprobe.diagnose.origin import sources
from hsprobe.diagnose.stream import View
from hsprobe.trace.reader import Rank
from hsprobe.trace.schema import RowStatus

_ROWS = 64
_MOST = 0.9
_MIN_ROWS = 4


@dataclass(frozen=True)
class Blocks:
    """Which block of the truth each block of a tensor holds: `order` [B], and the errors with and without "
    "it."""

    order: list[int]
    error: float
    before: float


def blocks(tensor: Stack, truth: Sequence[Lane], count: int, noise: float) -> Blocks | None:
    """Identify the blocks of columns of a tensor; None where any of them is none of the truth's.

    Args:
        truth: the chunks that the tensor should be made of, in order.
        count: B, over all chunks.
    """
    keys = tensor.keys
    rows = spread(keys.usable, keys, _ROWS)
    view = View(tensor, rows)
    right = np.concatenate([view.read(lane) for lane in truth], axis=1)
    mine = tensor.read(rows)
    whole = finite_rows(right) & finite_rows(mine)
    if np.count_nonzero(whole) < _MIN_ROWS or right.shape != mine.shape or right.shape[1] % count:
        return None
    scale = channel_scale(right[whole])
    right, mine = right[whole], mine[whole]
    distance = _distances(_cut(mine, count), _cut(right, count), _cut(scale[None], count)[0])
    order = np.argmin(distance, axis=1)
    error = float(distance[np.arange(count), order].max())
    before = float(np.diag(distance).max())
    if error > MEDIAN_ALLOWANCE * noise or len(set(order.tolist())) < count:
        return None
    return Blocks(order.tolist(), error, before)


def _cut(values: Floats, count: int) -> Floats:
    """[n, B * h] -> [n, B, h]"""
    return values.reshape(len(values), count, -1)


def _distances(mine: Floats, right: Floats, scale: Floats) -> NDArray[np.float64]:
    """Relative distance of every block from every other, in the channels of the latter. -> [B, B]"""
    count = right.shape[1]
    out = np.empty((count, count))
    for c in range(count):
        gap = (mine - right[:, c : c + 1]) / scale[c]
        size = np.sum((right[:, c] / scale[c]) ** 2)
        out[:, c] = np.sqrt(np.sum(gap**2, axis=(0, 2)) / max(float(size), 1e-12))
    return out


def wrong_rows(lane: Lane, state: Lane, limit: float) -> Rows:
    """Rows of a lane's stack that are not their own partners' state."""
    rows, errors = errors_of(lane, state)
    wrong: Rows = rows[~(errors <= limit)]
    return wrong


def of_padding(lane: Lane, rows: Rows, state: Lane, noise: float) -> Rows:
    """Those of the rows that hold the state of a padding row."""
    if not (state.stack.keys.status == int(RowStatus.PADDING)).any():
        return rows[:0]
    found = sources(lane, rows, state, noise).found
    padding = state.stack.keys.status[np.maximum(found, 0)] == int(RowStatus.PADDING)
    there: Rows = rows[(found >= 0) & padding]
    return there


def true_rows(lane: Lane, state: Lane, noise: float) -> Rows | None:
    """For each usable row of a lane the row of the state that it holds; None where most hold none.

    Only rows of the same pass are its own; where equal rows stand in several, the one of its own pass counts.
    """
    usable = lane.stack.keys.usable
    found = sources(lane, usable, state, noise).found
    return found if np.mean(found >= 0) >= _MOST else None


def order_of(stack: Stack, rows: Rows, table: Rank, ranks: int) -> tuple[str, float]:
    """How rows that a rank holds, or their order, follow from the number of ranks, and in how many passes.

    Args:
        rows: rows of the rank's table, in the order in which the tensor holds them.

    Returns:
        ("in blocks" | "interleaved" | "", share of the passes with several rows that bear it out).
    """
    passes = np.asarray(table.rows["pass"], np.int64)
    starts = np.searchsorted(passes, np.arange(len(table.passes["id"])))
    ends = np.append(starts[1:], len(passes))
    kinds = {"in blocks": 0, "interleaved": 0}
    seen = 0
    which = passes[rows]
    for number in np.unique(which):
        index = rows[which == number] - starts[number]
        total = int(ends[number] - starts[number])
        whole = len(index) == total
        if len(index) < 2 or (whole and total < 2 * ranks):
            continue
        seen += 1
        steps = np.diff(index)
        if not whole:
            kinds["in blocks"] += bool((steps == 1).all())
            kinds["interleaved"] += bool((steps == ranks).all())
        else:
            kinds["interleaved"] += _interleaved(index, ranks)
            kinds["in blocks"] += _in_blocks(index, ranks)
    best = max(kinds, key=lambda kind: kinds[kind])
    share = kinds[best] / seen if seen else 0.0
    return (best, share) if share >= _MOST / 2 else ("", share)


def _interleaved(index: Rows, ranks: int) -> bool:
    """Whether a whole pass stands part after part where it should alternate, or the other way round."""
    if len(index) % ranks:
        index = index[: len(index) - len(index) % ranks]
    part = len(index) // ranks
    straight = np.arange(len(index))
    after = straight.reshape(part, ranks).T.reshape(-1)
    turned = straight.reshape(ranks, part).T.reshape(-1)
    return bool((index == after).all() or (index == turned).all()) and not bool((index == straight).all())


def _in_blocks(index: Rows, ranks: int) -> bool:
    """Whether the blocks of the ranks stand in another order."""
    part = -(-len(index) // ranks)
    jumps = np.flatnonzero(np.diff(index) != 1) + 1
    return 0 < len(jumps) < ranks + 1 and bool((jumps % part == 0).all())


def table_rows(stack: Stack, rows: Rows) -> Rows:
    """The rows of the rank's table that rows of its tensor are."""
    found: Rows = stack.keys.row[rows] & ((1 << RANK_SHIFT) - 1)
    return found
