"""Ranks of one trace: who holds the same rows, which of them belong together, and views over several at once.

Shapes: n rows, W width of a tensor, R ranks, H width of a chunk, h width of a shard (H / R), K chunks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from hsprobe.compare.align import Pairs, by_context
from hsprobe.compare.stack import RANK_SHIFT, Keys, Rows, Stack
from hsprobe.compare.statistics import Floats
from hsprobe.trace.reader import Rank, Trace

# A row of a pass is named by (pass id, model, index in the pass).
_INDEX_BITS, _MODEL_BITS, _PASS_BITS = 20, 1, 42
# Where fewer rows than this share are joined by pass, the passes of the two ranks are not counted alike.
_JOINED = 0.5


@dataclass(frozen=True)
class Member:
    """One rank.

    Attributes:
        number: its place in `Trace.ranks`. index: its number as recorded. of: how many ranks there are.
        tp, pp, dp: its place.
    """

    number: int
    index: int
    of: int
    tp: int
    pp: int
    dp: int

    @property
    def name(self) -> str:
        """`rank 1 of 2 (tp 1)`; with pp and dp where they say more."""
        place = [f"tp {self.tp}"]
        place += [f"{axis} {value}" for axis, value in (("pp", self.pp), ("dp", self.dp)) if value]
        return f"rank {self.index} of {self.of} ({', '.join(place)})"


def members(trace: Trace) -> list[Member]:
    """The ranks of a trace, in their order."""
    return [
        Member(
            number,
            rank.index,
            len(trace.ranks),
            rank.coords.get("tp", 0),
            rank.coords.get("pp", 0),
            rank.coords.get("dp", 0),
        )
        for number, rank in enumerate(trace.ranks)
    ]


def groups(found: Sequence[Member]) -> list[list[Member]]:
    """Ranks that compute the same rows of the same layers: those of one pipeline stage and data-parallel "
    "part."""
    together: dict[tuple[int, int], list[Member]] = {}
    for member in found:
        together.setdefault((member.dp, member.pp), []).append(member)
    return list(together.values())


def names(found: Sequence[Member]) -> str:
    """`rank 1 of 2 (tp 1)`, `ranks 1, 2 and 3 of 4`."""
    if len(found) == 1:
        return found[0].name
    numbers = [str(member.index) for member in found]
    return f"ranks {', '.join(numbers[:-1])} and {numbers[-1]} of {found[0].of}"


class PassRows:
    """Names the rows of one rank's pass table alike on every rank that ran the same passes."""

    def __init__(self, rank: Rank) -> None:
        passes = np.asarray(rank.rows["pass"], np.int64)
        starts = np.searchsorted(passes, np.arange(len(rank.passes["id"])))
        ids, models = (np.asarray(rank.passes[name], np.int64) for name in ("id", "model"))
        index = np.arange(len(passes)) - starts[passes] if len(passes) else passes
        sorted_passes = bool((passes[1:] >= passes[:-1]).all())
        inside = (ids >= 0) & (ids < 1 << _PASS_BITS)
        known = inside[passes] & (index < 1 << _INDEX_BITS) & sorted_passes
        mark = (((np.where(inside, ids, 0) << _MODEL_BITS) + models) << _INDEX_BITS)[passes] + index
        self._names: Rows = np.where(known, mark, -1)

    def of(self, keys: Keys, rows: Rows) -> Rows:
        """Names of rows of a stack of this rank, -1 where a row has none. [n] -> [n]"""
        named: Rows = self._names[keys.row[rows] & ((1 << RANK_SHIFT) - 1)]
        return named


def join(base: Stack, other: Stack, passes: Mapping[int, PassRows]) -> Pairs:
    """The row of another rank's tensor that stands for the same row of the same pass.

    By pass and place in it; by context where the two ranks do not count their passes alike.

    Args:
        base, other: tensors of one rank each.
        passes: number of a rank -> its rows by name.
    """
    left, right = base.keys.usable, other.keys.usable
    mine = passes[number_of(base)].of(base.keys, left)
    theirs = passes[number_of(other)].of(other.keys, right)
    table, first = np.unique(theirs, return_index=True)
    if len(table):
        at = np.minimum(np.searchsorted(table, mine), len(table) - 1)
        hit = (table[at] == mine) & (mine >= 0)
        pairs = Pairs(left[hit], right[first[at[hit]]])
        same = base.keys.context[pairs.left] == other.keys.context[pairs.right]
        same &= base.keys.position[pairs.left] == other.keys.position[pairs.right]
        if np.count_nonzero(same) >= _JOINED * min(len(left), len(right)):
            return Pairs(pairs.left[same], pairs.right[same])
    return by_context(base.keys, other.keys)


def number_of(stack: Stack) -> int:
    """The place in `Trace.ranks` of the rank that holds a stack of one rank."""
    return int(stack.keys.row[0]) >> RANK_SHIFT


def common(stacks: Sequence[Stack], passes: Mapping[int, PassRows]) -> list[Rows]:
    """For each stack the rows that all of them hold, in the order of the first's. R times [n]"""
    base = stacks[0]
    found = [join(base, other, passes) for other in stacks[1:]]
    rows = base.keys.usable
    for pairs in found:
        rows = rows[np.isin(rows, pairs.left)]
    return [rows, *(pairs.right[np.searchsorted(pairs.left, rows)] for pairs in found)]


def narrowed(keys: Keys, rows: Rows) -> Keys:
    """The labels of some rows."""
    return Keys(**{column.name: getattr(keys, column.name)[rows] for column in fields(keys)})


def _labels(base: Stack, keys: Keys) -> dict[str, Any]:
    """What a view over a stack takes over from it."""
    return {one.name: getattr(base, one.name) for one in fields(Stack) if one.init} | {"keys": keys}


@dataclass
class Mean(Stack):
    """The mean over ranks of one tensor, over the rows that all of them hold; labelled as the first rank's.

    Attributes:
        parts: each rank's stack, and its row for each row of this one.
    """

    parts: list[tuple[Stack, Rows]] = field(default_factory=list)

    @classmethod
    def of(cls, stacks: Sequence[Stack], passes: Mapping[int, PassRows]) -> Mean:
        """One stack a rank."""
        rows = common(stacks, passes)
        base = stacks[0]
        keys = narrowed(base.keys, rows[0])
        return cls(**_labels(base, keys), parts=list(zip(stacks, rows, strict=True)))

    def read(self, rows: Rows) -> Floats:
        """[n] -> [n, W]"""
        out = np.zeros((len(rows), self.width), np.float64)
        for stack, index in self.parts:
            # One rank at a time, so that memory does not grow with ranks.
            out += stack.read(index[rows])
        mean: Floats = (out / len(self.parts)).astype(np.float32)
        return mean


@dataclass
class Changed(Stack):
    """A stack of chunks with the values of some chunks put right.

    Attributes:
        inner: the stack as it is; `swaps`: chunk -> what reads its right values for rows of `inner`.
        hidden: H.
    """

    inner: Stack | None = None
    swaps: Mapping[int, Reader] = field(default_factory=dict)
    hidden: int = 0

    @classmethod
    def of(cls, inner: Stack, swaps: Mapping[int, Reader], hidden: int) -> Changed:
        """A stack with these chunks put right."""
        return cls(**_labels(inner, inner.keys), inner=inner, swaps=swaps, hidden=hidden)

    def read(self, rows: Rows) -> Floats:
        """[n] -> [n, W]"""
        assert self.inner is not None
        out = self.inner.read(rows)
        for chunk, reader in self.swaps.items():
            columns = slice(chunk * self.hidden, (chunk + 1) * self.hidden)
            out[:, columns] = reader.read(rows, out[:, columns])
        return out


class Reader:
    """Reads the right values of one chunk."""

    def read(self, rows: Rows, values_nH: Floats) -> Floats:
        """Values of the chunk at some rows, put right. [n], [n, H] -> [n, H]"""
        raise NotImplementedError


@dataclass
class Shards(Stack):
    """Width shards of several ranks side by side, each chunk by itself; labelled as the first rank's.

    Attributes:
        parts: each rank's stack and its row for each row of this one, in the order in which they join.
        count: K.
    """

    parts: list[tuple[Stack, Rows]] = field(default_factory=list)
    count: int = 1

    @classmethod
    def of(cls, stacks: Sequence[Stack], passes: Mapping[int, PassRows], count: int) -> Shards:
        """One stack a rank, in the order of the ranks."""
        rows = common(stacks, passes)
        base = stacks[0]
        keys = narrowed(base.keys, rows[0])
        parts = list(zip(stacks, rows, strict=True))
        return cls(**_labels(base, keys), parts=parts, count=count)

    def ordered(self, order: Sequence[int]) -> Shards:
        """The same with the ranks' shards in another order."""
        return replace(self, parts=[self.parts[r] for r in order])

    @property
    def width(self) -> int:
        return int(self.tensor.shape[1]) * len(self.parts)

    def read(self, rows: Rows) -> Floats:
        """[n] -> [n, K * R * h]"""
        shard = int(self.tensor.shape[1]) // self.count
        out = np.empty((len(rows), self.count, len(self.parts), shard), np.float32)
        for place, (stack, index) in enumerate(self.parts):
            out[:, :, place] = stack.read(index[rows]).reshape(len(rows), self.count, shard)
        return out.reshape(len(rows), -1)


@dataclass
class Taken(Stack):
    """Some rows of a stack, or its rows under other labels.

    Attributes:
        inner: the stack; `index`: its row for each row of this one.
    """

    inner: Stack | None = None
    index: Rows = field(default_factory=lambda: np.zeros(0, np.int64))

    @classmethod
    def of(cls, inner: Stack, index: Rows, keys: Keys | None = None) -> Taken:
        """Rows of a stack, by default under their own labels."""
        labels = narrowed(inner.keys, index) if keys is None else keys
        return cls(**_labels(inner, labels), inner=inner, index=index)

    @property
    def width(self) -> int:
        assert self.inner is not None
        return self.inner.width

    def read(self, rows: Rows) -> Floats:
        """[n] -> [n, W]"""
        assert self.inner is not None
        return self.inner.read(self.index[rows])


@dataclass
class Columns(Stack):
    """A stack with its blocks of columns in another order.

    Attributes:
        inner: the stack; `order`: for each block of this one its block there.
    """

    inner: Stack | None = None
    order: Sequence[int] = ()

    @classmethod
    def of(cls, inner: Stack, order: Sequence[int]) -> Columns:
        """The blocks of a stack, in this order."""
        return cls(**_labels(inner, inner.keys), inner=inner, order=list(order))

    @property
    def width(self) -> int:
        assert self.inner is not None
        return self.inner.width

    def read(self, rows: Rows) -> Floats:
        """[n] -> [n, W]"""
        assert self.inner is not None
        found = self.inner.read(rows)
        blocks = found.reshape(len(found), len(self.order), -1)
        return np.ascontiguousarray(blocks[:, list(self.order)]).reshape(len(found), -1)


@dataclass
class Together(Stack):
    """The rows of several stacks of one name, one after the other."""

    parts: list[Stack] = field(default_factory=list)

    @classmethod
    def of(cls, parts: Sequence[Stack]) -> Together:
        """As one."""
        first = parts[0]
        keys = Keys(
            **{
                column.name: np.concatenate([getattr(part.keys, column.name) for part in parts])
                for column in fields(first.keys)
            }
        )
        return cls(**_labels(first, keys), parts=list(parts))

    @property
    def width(self) -> int:
        return self.parts[0].width

    def read(self, rows: Rows) -> Floats:
        """[n] -> [n, W]"""
        out = np.empty((len(rows), self.width), np.float32)
        start = 0
        for part in self.parts:
            here = (rows >= start) & (rows < start + part.rows)
            if here.any():
                out[here] = part.read(rows[here] - start)
            start += part.rows
        return out
