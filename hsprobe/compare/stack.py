"""One tensor name of a trace as a single table of rows, whatever number of ranks recorded it.

Shapes: N rows of a stack, n rows asked for, W width of the tensor, H width of a chunk.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hsprobe.compare.statistics import Floats, channel_scale
from hsprobe.compare.tables import Below, Source
from hsprobe.trace.reader import Rank, Trace
from hsprobe.trace.schema import ITEM_SIZE, NO_CONTEXT, Model, RowStatus
from hsprobe.trace.tensor import Tensor

Depth = int | Literal["final"] | None
Rows = NDArray[np.int64]

_ROW_LABELS = ("context", "position", "token", "request", "status")
COMPARABLE = (int(RowStatus.PLAIN), int(RowStatus.ACCEPTED))
# Rows that channel magnitudes are taken from, and how many of them lie side by side.
_SCALE_ROWS, _RUN = 256, 8
# Row ids are unique over ranks: the rank in the high bits, the index into its row table in the low ones.
RANK_SHIFT = 40


@dataclass(frozen=True)
class Keys:
    """What each row of a stack is. All arrays [N].

    Attributes:
        context: uint64, hash of the token ids up to and including the row's own.
        row: int64, identifies the row of a pass; equal for tensors taken in the same pass at the same row.
    """

    context: NDArray[np.uint64]
    position: Rows
    token: Rows
    request: Rows
    phase: NDArray[np.uint8]
    status: NDArray[np.uint8]
    model: NDArray[np.uint8]
    graph: NDArray[np.uint8]
    row: Rows

    @cached_property
    def usable(self) -> Rows:
        """Indices of rows that stand for a committed token with a known context, ascending."""
        mask = np.isin(self.status, COMPARABLE) & (self.context != NO_CONTEXT)
        return np.flatnonzero(mask).astype(np.int64)

    @cached_property
    def by_context(self) -> tuple[NDArray[np.uint64], Rows]:
        """Distinct contexts of the usable rows, sorted, and the first row that has each."""
        contexts, first = np.unique(self.context[self.usable], return_index=True)
        return contexts, self.usable[first]

    @cached_property
    def by_row(self) -> tuple[Rows, Rows]:
        """Row ids of the usable rows, sorted, and the index of each."""
        here = self.row[self.usable]
        if bool((here[1:] > here[:-1]).all()):
            return here, self.usable
        ids, first = np.unique(self.row[self.usable], return_index=True)
        return ids, self.usable[first]


@dataclass
class Stack:
    """The tensors of one name, rank after rank.

    Attributes:
        side: "train" or "infer".
        pieces: the tensors, one below the other.
        routed: whether the rows come from a mixture of experts in which rounding may decide who computes.
    """

    side: str
    name: str
    pieces: list[Tensor]
    keys: Keys
    routed: bool = False
    _scales: dict[tuple[int, bytes], Floats] = field(default_factory=dict, init=False, repr=False)

    @property
    def tensor(self) -> Tensor:
        """The first piece, which speaks for the attributes of all."""
        return self.pieces[0]

    @property
    def width(self) -> int:
        return int(self.tensor.shape[1])

    @property
    def rows(self) -> int:
        return len(self.keys.context)

    @property
    def dtype(self) -> str:
        return self.tensor.dtype

    @property
    def depth(self) -> Depth:
        return self.tensor.depth

    @property
    def row_bytes(self) -> int:
        """Stored bytes of one row."""
        return self.width * ITEM_SIZE.get(self.dtype, 4)

    @property
    def source(self) -> Source | None:
        """Where its rows lie, for another process to read them; None for a view over other stacks."""
        return Source(tuple(piece.place for piece in self.pieces)) if type(self) is Stack else None

    def read(self, rows: Rows) -> Floats:
        """Rows in the order asked for, repeats allowed. [n] -> [n, W] float32."""
        return Below(self.pieces).read(rows)

    def scales(self, rows: Rows, width: int) -> Floats:
        """Robust magnitude of every channel, of each block of `width` columns by itself. [n] -> [W]

        From a sample of the rows, in short runs: what is stored in chunks is read by whole chunks.
        """
        sample = self.sample(rows)
        found = self.known_scales(sample, width)
        if found is None:
            return self.learn_scales(sample, width, scales_of(self.read(sample), width))
        return found

    def sample(self, rows: Rows) -> Rows:
        """The rows that magnitudes are taken from where these are compared, ascending."""
        return runs(rows, self.keys, _SCALE_ROWS)

    def known_scales(self, sample: Rows, width: int) -> Floats | None:
        """What is known of a sample already."""
        return self._scales.get((width, sample.tobytes()))

    def learn_scales(self, sample: Rows, width: int, found: Floats) -> Floats:
        """Keep what was found out, here or by another process."""
        return self._scales.setdefault((width, sample.tobytes()), found)


def scales_of(values_nW: Floats, width: int) -> Floats:
    """Robust magnitude of every channel, of each block of `width` columns by itself. [n, W] -> [W]"""
    lows = range(0, values_nW.shape[1], width)
    return np.concatenate([channel_scale(values_nW[:, low : low + width]) for low in lows])


def stacks_of(
    trace: Trace, side: str, numbers: Mapping[str, Collection[int]] | Collection[int] | None = None
) -> dict[str, Stack]:
    """Every tensor of a trace by name. Tensors with the same rows share one `Keys`.

    Args:
        numbers: places in `trace.ranks` of the ranks to take, for all names or for each; by default all.
    """
    cache: dict[tuple[tuple[int, int], ...], Keys] = {}
    stacks: dict[str, Stack] = {}
    names = sorted({name for rank in trace.ranks for name in rank.tensors})
    for name in names:
        found = [
            (number, rank, rank.tensors[name])
            for number, rank in enumerate(trace.ranks)
            if name in rank.tensors and rank.tensors[name].shape[0] > 0 and _taken(numbers, name, number)
        ]
        if not found:
            continue
        # The reader keeps equal row indices of a rank as one array, so its identity tells them apart.
        mark = tuple((number, id(tensor.row_index)) for number, _, tensor in found)
        if mark not in cache:
            cache[mark] = _keys(found)
        stacks[name] = Stack(side, name, [tensor for _, _, tensor in found], cache[mark])
    return stacks


def _taken(numbers: Mapping[str, Collection[int]] | Collection[int] | None, name: str, number: int) -> bool:
    if numbers is None:
        return True
    return number in (numbers.get(name, ()) if isinstance(numbers, Mapping) else numbers)


def _keys(found: list[tuple[int, Rank, Tensor]]) -> Keys:
    parts: dict[str, list[NDArray[Any]]] = {}
    for number, rank, tensor in found:
        index = np.asarray(tensor.row_index, np.int64)
        columns = {name: _take(rank.rows[name], index) for name in _ROW_LABELS}
        passes = _take(rank.rows["pass"], index)
        columns["phase"] = rank.passes["phase"][passes]
        columns["model"] = rank.passes["model"][passes]
        columns["graph"] = rank.passes["graph"][passes]
        columns["row"] = index + (number << RANK_SHIFT) if number else index
        for name, values in columns.items():
            parts.setdefault(name, []).append(values)
    return Keys(
        **{name: values[0] if len(values) == 1 else np.concatenate(values) for name, values in parts.items()}
    )


def _take(column: NDArray[Any], index: Rows) -> NDArray[Any]:
    """Entries of a column; consecutive ones without a copy, since labels are what memory grows with."""
    if len(index) and int(index[-1]) - int(index[0]) + 1 == len(index) and bool((np.diff(index) == 1).all()):
        return column[int(index[0]) : int(index[-1]) + 1]
    return column[index]


def is_draft(stack: Stack) -> bool:
    """Whether the rows were computed by the draft model."""
    return bool((stack.keys.model == int(Model.DRAFT)).any())


def spread(rows: Rows, keys: Keys, count: int) -> Rows:
    """At most `count` of the rows, evenly spaced within each phase, every phase with its fair share."""
    if len(rows) <= count:
        return rows
    groups = [rows[keys.phase[rows] == phase] for phase in np.unique(keys.phase[rows])]
    groups.sort(key=len)
    chosen: list[Rows] = []
    left = count
    for remaining, group in zip(range(len(groups), 0, -1), groups, strict=True):
        share = min(len(group), max(1, left // remaining))
        chosen.append(group[np.linspace(0, len(group) - 1, share).astype(np.int64)])
        left -= share
    return np.unique(np.concatenate(chosen))


def runs(rows: Rows, keys: Keys, count: int) -> Rows:
    """As `spread`, but in runs of a few neighbours, which lie side by side in the file."""
    if len(rows) <= count:
        return rows
    anchors = np.searchsorted(rows, spread(rows, keys, count // _RUN))
    chosen = np.minimum(anchors[:, None] + np.arange(_RUN), len(rows) - 1)
    taken: Rows = rows[np.unique(chosen)]
    return taken
