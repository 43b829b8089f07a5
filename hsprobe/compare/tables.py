"""Where the values of rows come from: tensors of trace files, open here or to be opened in another process.

Shapes: n rows asked for, W width of a table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from types import TracebackType
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from hsprobe.compare.cursor import Cursor, Layout
from hsprobe.compare.statistics import Floats
from hsprobe.trace.extents import Extents
from hsprobe.trace.tensor import Place, Tensor, open_tensors, to_float32

Rows = NDArray[np.int64]

# A comparison holds about eight blocks at once: what is read, converted, scaled, subtracted.
_BLOCK_BYTES = 2 << 20
_LEAST_BLOCK_ROWS = 64


class Table(Protocol):
    """Rows of values: tensors one below the other, or a view over some."""

    @property
    def width(self) -> int:
        """W."""
        ...

    def read(self, rows: Rows) -> Floats:
        """Rows in the order asked for, repeats allowed. [n] -> [n, W] float32."""
        ...


@dataclass(frozen=True)
class Source:
    """Where the rows of a stack lie: tensors, one below the other."""

    places: tuple[Place, ...]


@dataclass(frozen=True)
class Below:
    """Tensors one below the other, as one table."""

    tensors: Sequence[Tensor]

    @property
    def width(self) -> int:
        return int(self.tensors[0].shape[1])

    @property
    def dtype(self) -> str | None:
        """The element type, None where the tensors differ in it."""
        found = {tensor.dtype for tensor in self.tensors}
        return found.pop() if len(found) == 1 else None

    @cached_property
    def layout(self) -> Layout:
        """Where its tiles are."""
        return Layout(self.tensors)

    def read(self, rows: Rows) -> Floats:
        """Rows in the order asked for, repeats allowed. [n] -> [n, W] float32."""
        wanted, back = np.unique(rows, return_inverse=True)
        out = self._read(wanted)
        return out if len(wanted) == len(rows) and bool((wanted == rows).all()) else out[back]

    def _read(self, wanted: Rows) -> Floats:
        """Rows in ascending order, each once."""
        out = np.empty((len(wanted), self.width), np.float32)
        if self.dtype is not None and all(found and found.chunked for found in self._extents):
            cursor, changes = Cursor(self.layout), np.diff(self.layout.tiles(wanted))
            for low, high in pairwise([0, *(np.flatnonzero(changes) + 1).tolist(), len(wanted)]):
                if low < high:
                    cursor.begin(wanted[low:high])
                    out[low:high] = to_float32(cursor.columns((0, self.width)), self.dtype)
            return out
        start = 0
        for tensor in self.tensors:
            low, high = np.searchsorted(wanted, [start, start + len(tensor)])
            if low < high:
                out[low:high] = tensor.read(_selector(wanted[low:high] - start))
            start += len(tensor)
        return out

    @property
    def _extents(self) -> list[Extents | None]:
        return [tensor.extents for tensor in self.tensors]


def _selector(rows: Rows) -> slice | Rows:
    """A slice where the rows are consecutive, which HDF5 reads many times faster."""
    if int(rows[-1]) - int(rows[0]) + 1 == len(rows):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows


@dataclass(frozen=True)
class Held:
    """Some rows of a table that were read before: `values` [n, W] of `rows` [n], ascending."""

    rows: Rows
    values: Floats

    @property
    def width(self) -> int:
        return int(self.values.shape[1])

    def read(self, rows: Rows) -> Floats:
        """Rows in the order asked for, repeats allowed. [n] -> [n, W] float32."""
        found: Floats = self.values[np.searchsorted(self.rows, rows)]
        return found


class Tables:
    """The tables that shards name, opened when first asked for; a context manager that closes them."""

    def __init__(self, lent: Mapping[Source, Table] | None = None) -> None:
        """`lent`: tables that are open already, and stay so."""
        self._open: dict[Source, Table] = dict(lent or {})
        self._files = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()

    def of(self, source: Source | Table) -> Table:
        """The table of a source.

        Raises:
            HsprobeError: a file is missing or damaged.
        """
        if not isinstance(source, Source):
            return source
        if source not in self._open:
            self._open[source] = Below(self._files.enter_context(open_tensors(source.places)))
        return self._open[source]


def blocks(rows: int, width: int) -> Iterator[slice]:
    """Slices over `rows` rows, each a bounded number of bytes at this width."""
    step = max(_LEAST_BLOCK_ROWS, _BLOCK_BYTES // (4 * max(width, 1)))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
