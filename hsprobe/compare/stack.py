"""One tensor name of a trace as a single table of rows, whatever number of ranks recorded it.

Shapes: N rows of a stack, n rows asked for, W width of the tensor, H width of a chunk.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hsprobe.compare.statistics import Floats
from hsprobe.compare.tables import Below, Source
from hsprobe.trace.reader import Rank, Trace
from hsprobe.trace.schema import ITEM_SIZE, NO_CONTEXT, Model, RowStatus
from hsprobe.trace.tensor import Tensor

Depth = int | Literal["final"] | None
Rows = NDArray[np.int64]

_ROW_LABELS = ("context", "position", "token", "request", "status")
COMPARABLE = (int(RowStatus.PLAIN), int(RowStatus.ACCEPTED))
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
