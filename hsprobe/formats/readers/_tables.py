"""Samples out of files whose tensors have been named: one a file, a group each, stacked, or end to end.

Names are those of a trace (aux, final, embed, layer/3), and input_ids, loss_mask, attention_mask, lengths,
offsets. Letters: n samples of a file, S tokens, T tokens of all samples of a file, W width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from hsprobe.errors import HsprobeError
from hsprobe.formats.dump import Chunks, Layout, Rows, Sample, squeezed
from hsprobe.formats.stored import BITS, Ints, Stored, damaged

ABOUT_TOKENS = ("input_ids", "loss_mask", "attention_mask", "lengths", "offsets", "start")
Get = Callable[[str], Stored | None]
"""name in a trace -> its tensor in the file at hand, None where it has none."""


@dataclass
class Table:
    """The tensors of one file.

    Args:
        name: of the file. states: names of the tensors that hold states.
        get: gives the tensor of a name; for groups, of a name and a group.
    """

    name: str
    states: tuple[str, ...]
    get: Get

    def count(self) -> int:
        """How many samples are in it."""
        offsets, ids = self.get("offsets"), self.get("input_ids")
        if offsets is not None:
            return max(0, offsets.size - 1)
        if ids is not None and ids.ndim == 2:
            # Ids without a token claim any number of samples in no bytes at all.
            return ids.shape[0] if ids.size else 1
        return 1

    @property
    def single(self) -> bool:
        """Whether it is one sample, without a number."""
        ids = self.get("input_ids")
        return self.get("offsets") is None and (ids is None or ids.ndim == 1 or ids.shape[0] == 1)

    def tokens(self, index: int) -> Ints | None:
        """Token ids of a sample, padding left out where a mask or a length tells it."""
        found = self.get("input_ids")
        if found is None:
            return None
        place = f"{self.name}: input_ids"
        low, high = self._span(index)
        values = (squeezed(found, 1) if found.ndim == 1 or self.single else found.at(index)).integers()
        return self._real(values[low:high] if self.get("offsets") is not None else values, index, place)

    def sample(self, name: str, index: int) -> Sample:
        """One sample."""
        tokens = self.tokens(index)
        rows = []
        for state in self.states:
            found = self.get(state)
            if found is not None:
                rows.append(Rows(state, (self._rows(found, index),), start=self._start(state)))
        loss = self.get("loss_mask")
        mask = None
        if loss is not None and tokens is not None and self.single:
            mask = loss.integers()[: len(tokens)]
        return Sample(name, tokens, tuple(rows), loss_mask=mask)

    def _rows(self, found: Stored, index: int) -> Stored:
        if self.get("offsets") is not None:
            low, high = self._span(index)
            if found.ndim != 2 or high > found.shape[0]:
                raise damaged(found.name, f"its shape {list(found.shape)} does not fit the offsets")
            return found.rows(low, high)
        if self.single:
            return squeezed(found, 2)
        if found.ndim != 3 or index >= found.shape[0]:
            raise damaged(found.name, f"its shape {list(found.shape)} does not fit the token ids")
        return found.at(index)

    def _span(self, index: int) -> tuple[int, int]:
        offsets = self.get("offsets")
        if offsets is None:
            return 0, 0
        values = offsets.rows(index, index + 2).integers()
        ids = self.get("input_ids")
        low, high = int(values[0]), int(values[1])
        if not 0 <= low <= high or (ids is not None and high > ids.size):
            raise damaged(f"{self.name}: offsets", "they lie outside the token ids")
        return low, high

    def _real(self, values: Ints, index: int, place: str) -> Ints:
        lengths, mask = self.get("lengths"), self.get("attention_mask")
        if lengths is not None:
            values = values[: max(0, int(lengths.rows(index, index + 1).integers()[0]))]
        elif mask is not None:
            real = (squeezed(mask, 1) if self.single else mask.at(index)).integers()[: len(values)] != 0
            if len(real) and not real[0]:
                raise damaged(place, "it is padded on the left, which no producer known here does")
            values = values[: int(real.sum())]
        if len(values) and int(values.min()) < 0:
            raise damaged(place, "it holds a negative token id")
        return values

    def _start(self, state: str) -> int:
        found = self.get(f"{state}.start")
        return 0 if found is None else max(0, int(found.integers()[0]))


class TableSamples:
    """A dump of tables.

    Args:
        tables: name of a table -> the table. names: names of all tables.
    """

    def __init__(
        self, layout: Layout, names: Callable[[], Iterator[str]], table: Callable[[str], Table]
    ) -> None:
        self.layout = layout
        self._names = names
        # A table of many samples should not be opened for each of them.
        self._table = lru_cache(maxsize=4)(table)

    def names(self) -> Iterator[str]:
        """See `Reader`. Files that cannot be opened keep their name, so that the trouble is told of them."""
        for name in self._names():
            try:
                table = self._table(name)
                single, count = table.single, table.count()
            except HsprobeError:
                yield name
                continue
            if single:
                yield name
            else:
                yield from (f"{name}#{index}" for index in range(count))

    def tokens(self, name: str) -> Ints | None:
        """See `Reader`."""
        table, index = self._place(name)
        return table.tokens(index)

    def sample(self, name: str) -> Sample:
        """See `Reader`."""
        table, index = self._place(name)
        return table.sample(name, index)

    def _place(self, name: str) -> tuple[Table, int]:
        file, sharp, index = name.rpartition("#")
        return (self._table(file), int(index)) if sharp and index.isdecimal() else (self._table(name), 0)


def with_type(found: Stored, dtype: str | None) -> Stored:
    """The same bits as another type of the same size, such as uint16 as bfloat16.

    Raises:
        HsprobeError: there is no such type, or it has another size.
    """
    if dtype is None or dtype == found.dtype:
        return found
    if dtype not in BITS or np.dtype(BITS[dtype]).itemsize != np.dtype(BITS[found.dtype]).itemsize:
        raise damaged(found.name, f"its {found.dtype} cannot be read as {dtype[:40]}")
    code = np.dtype(BITS[dtype])
    fetch = found.fetch
    return replace(found, dtype=dtype, fetch=lambda first, count: fetch(first, count).view(code))


def chunks_of(states: Mapping[str, Stored], numbering: Any, hidden: int | None) -> Chunks | None:
    """The aux vector, of as many chunks as fit its width."""
    if "aux" not in states:
        return None
    width = states["aux"].shape[-1] if states["aux"].shape else 0
    return Chunks(width // hidden if hidden and width % hidden == 0 else 0, numbering)


def width_of(states: Mapping[str, Stored]) -> int | None:
    """H, by any state that is no aux vector."""
    return next((s.shape[-1] for name, s in states.items() if name != "aux" and s.shape), None)
