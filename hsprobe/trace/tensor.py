"""One tensor of a trace file: only the rows and columns asked for are read, memory bounded.

Letters: N rows of a tensor, n rows of a selection, W its width, K chunks of width H.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import h5py
import ml_dtypes
import numpy as np
import numpy.typing as npt

from hsprobe.errors import HsprobeError
from hsprobe.remote.location import Location, address, locate
from hsprobe.trace import _guard, schema
from hsprobe.trace.extents import Extents, extents

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Selection = slice | Ints | npt.NDArray[np.bool_] | None

_BLOCK_BYTES = 8 << 20
"""Most raw bytes read at once; what `read` returns comes on top."""


def to_float32(raw: Array, dtype: str) -> Floats:
    """Values from the storage type of a dtype; those beyond float32 become Inf. Same shape."""
    if raw.dtype != np.float32 and hasattr(ml_dtypes, dtype):
        raw = raw.view(np.dtype(getattr(ml_dtypes, dtype)))
    with np.errstate(over="ignore", invalid="ignore"):
        return raw.astype(np.float32, copy=False)


@dataclass(frozen=True)
class Place:
    """Where a tensor is: a trace file, which may be a URL, and the HDF5 path of its group in there."""

    file: str
    group: str


class Tensor:
    """What one site gave in one rank. Data stays in the file until it is read.

    Attributes:
        name: such as "layer/003".
        site: where it was taken.
        dtype: real element type, such as "bfloat16".
        depth: decoder layers applied, "final" (after the final norm), or None where that has no meaning.
        depths: of a vector of chunks: their depths in stored order as the producer declared them, or None.
        chunks: K, of a vector of chunks, or None.
        spread: "attn_tp" where SGLang held the rows in slices, one for each rank of attention TP,
            "tp_columns" where each rank has columns of its own by design; else None.
        shape: (N, W).
        place: where it is, for another process to open it.
    """

    def __init__(
        self, group: h5py.Group, name: str, path: Location, n_rows: int, share: Callable[[Ints], Ints]
    ) -> None:
        self.name = name
        self.place = Place(address(path), str(group.name))
        self._path = path
        self._n_rows = n_rows
        self._share = share
        self.site = _guard.text(group, "site", path) or ""
        self.dtype = _guard.text(group, "dtype", path) or ""
        if self.dtype not in schema.STORAGE or not self.site.isprintable():
            raise _guard.damaged(path, group.name, f"its dtype {self.dtype[:40]!r} or its site is not known")
        self._data = _guard.dataset(group, "data", path, schema.STORAGE[self.dtype], 2)
        self._row = _guard.dataset(group, "row", path, "<i8", 1)
        self.shape: tuple[int, int] = self._data.shape
        if self._row.shape[0] != self.shape[0]:
            raise _guard.damaged(
                path, group.name, f"{self.shape[0]} rows of data, {self._row.shape[0]} row indices"
            )
        depth = _guard.integer(group, "depth", path)
        self.depth: int | Literal["final"] | None = "final" if depth == schema.DEPTH_FINAL_CODE else depth
        self.depths = _guard.integers(group, "depths", path)
        self.chunks = _guard.integer(group, "chunks", path)
        self.spread = _guard.text(group, "spread", path)
        if self.chunks is not None and self.chunks < 1:
            raise _guard.damaged(path, group.name, f"it has {self.chunks} chunks")
        self._row_index: Ints | None = None

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def chunk_width(self) -> int:
        """H: width of one chunk; the whole width where the tensor is not made of chunks."""
        return self.shape[1] // (self.chunks or 1)

    @cached_property
    def extents(self) -> Extents | None:
        """Where its bytes lie, for readers in threads; None where HDF5 has to read them.

        Raises:
            HsprobeError: the file is damaged there.
        """
        with _guard.sound(self._path, f"tensor {self.name}"):
            return extents(self._data)

    @property
    def row_index(self) -> Ints:
        """[N] int64: which row of the rank each row of the tensor belongs to.

        Raises:
            HsprobeError: the file is damaged there.
        """
        if self._row_index is None:
            place = f"the rows of {self.name}"
            with _guard.sound(self._path, place):
                index = np.asarray(self._row[()])
            if len(index) and not (index.min() >= 0 and index.max() < self._n_rows):
                raise _guard.damaged(
                    self._path, place, f"one points outside the {self._n_rows} rows of its rank"
                )
            self._row_index = self._share(index)
        return self._row_index

    def read(self, sel: Selection = None, chunk: int | None = None) -> Floats:
        """Rows as float32.

        Args:
            sel: which rows: a slice, int64 indices in any order (repeats allowed), a mask [N], None for all.
            chunk: read only chunk k, the columns k*H to (k+1)*H.

        Returns:
            [n, W], or [n, H] with `chunk`.

        Raises:
            HsprobeError: the file is damaged there.
            IndexError: `sel` or `chunk` is out of range.
        """
        return self._read(sel, chunk, np.dtype(np.float32), lambda raw: to_float32(raw, self.dtype))

    def read_raw(self, sel: Selection = None, chunk: int | None = None) -> Array:
        """As `read`, but bit for bit in the storage type of `dtype`: bfloat16 as uint16, float8 as uint8."""
        return self._read(sel, chunk, self._data.dtype, lambda raw: raw)

    def read_columns(self, start: int, stop: int, low: int, high: int) -> Array:
        """Rows start..stop of columns low..high, by HDF5, bit for bit. -> [n, H]

        Raises:
            HsprobeError: the file is damaged there.
        """
        with _guard.sound(self._path, f"tensor {self.name}"):
            found: Array = self._data[start:stop, low:high]
            return found

    @property
    def itemsize(self) -> int:
        """Bytes of one stored element."""
        return int(self._data.dtype.itemsize)

    def _read(
        self, sel: Selection, chunk: int | None, dtype: np.dtype[Any], convert: Callable[[Array], Array]
    ) -> Array:
        columns = self._columns(chunk)
        rows = self._index(sel)
        out = np.empty((len(rows), columns.stop - columns.start), dtype)
        with _guard.sound(self._path, f"tensor {self.name}"):
            if isinstance(rows, range):
                for lo, hi in self._blocks(rows.start, rows.stop, columns):
                    out[lo - rows.start : hi - rows.start] = convert(self._data[lo:hi, columns])
                return out
            order = np.argsort(rows, kind="stable")
            done = 0
            for near in self._runs(rows[order], columns):
                lo, hi = int(near[0]), int(near[-1]) + 1
                # Not kept in a variable: two blocks would then be alive at once.
                out[order[done : done + len(near)]] = convert(self._data[lo:hi, columns][near - lo])
                done += len(near)
        return out

    def _columns(self, chunk: int | None) -> slice:
        if chunk is None:
            return slice(0, self.shape[1])
        if not 0 <= chunk < (self.chunks or 1):
            raise IndexError(f"{self.name} has {self.chunks or 1} chunks, not a chunk {chunk}")
        if self.shape[1] % (self.chunks or 1):
            raise HsprobeError(
                f"{self._path}: {self.name} is {self.shape[1]} wide, no multiple of {self.chunks} chunks.",
                "Check that the capture and the model it came from agree on the number of aux layers.",
            )
        return slice(chunk * self.chunk_width, (chunk + 1) * self.chunk_width)

    def _index(self, sel: Selection) -> range | Ints:
        """The rows asked for: a range where they lie side by side, else indices."""
        if sel is None:
            return range(self.shape[0])
        if isinstance(sel, slice):
            rows = range(self.shape[0])[sel]
            if rows.step == 1:
                return range(rows.start, max(rows.start, rows.stop))
            return np.arange(rows.start, rows.stop, rows.step, dtype=np.int64)
        chosen = np.asarray(sel)
        if chosen.dtype == np.bool_:
            if chosen.shape != self.shape[:1]:
                raise IndexError(f"a mask of {chosen.shape} for {self.shape[0]} rows of {self.name}")
            chosen = np.flatnonzero(chosen)
        index = chosen.astype(np.int64, casting="same_kind")
        if len(index) and not (index.min() >= 0 and index.max() < self.shape[0]):
            raise IndexError(f"{self.name} has {self.shape[0]} rows, a selected one lies outside")
        return index

    def _blocks(self, start: int, stop: int, columns: slice) -> Iterator[tuple[int, int]]:
        row_bytes = max(1, (columns.stop - columns.start) * self._data.dtype.itemsize)
        step = max(1, _BLOCK_BYTES // row_bytes)
        stored = self._chunk_rows()
        # A block that ends inside a stored chunk would have it read twice.
        step = step // stored * stored if step > stored else step
        for lo in range(start, stop, step):
            yield lo, min(lo + step, stop)

    def _runs(self, index: Ints, columns: slice) -> Iterator[Ints]:
        """Cut sorted indices into runs that lie near each other, each to be read as one block."""
        cuts = np.flatnonzero(np.diff(index) > self._chunk_rows()) + 1
        for run in np.split(index, cuts):
            if not len(run):
                continue
            for lo, hi in self._blocks(int(run[0]), int(run[-1]) + 1, columns):
                near = run[np.searchsorted(run, lo) : np.searchsorted(run, hi)]
                if len(near):
                    yield near

    def _chunk_rows(self) -> int:
        return int(self._data.chunks[0]) if self._data.chunks else 1


@contextmanager
def open_tensors(places: Sequence[Place]) -> Iterator[list[Tensor]]:
    """Tensors to read values from, without the labels of their rows, which the caller knows.

    Raises:
        HsprobeError: a file is missing, damaged or no trace, or does not hold the tensor.
    """
    with ExitStack() as stack:
        files: dict[str, h5py.File] = {}
        found = []
        for place in places:
            path = locate(place.file)
            if place.file not in files:
                files[place.file] = stack.enter_context(_guard.open_file(path))
            group = files[place.file]
            for name in place.group.strip("/").split("/"):
                group = _guard.group(group, name, path)
            found.append(Tensor(group, place.group.rpartition("tensors/")[2], path, 0, lambda index: index))
        yield found
