"""Where the bytes of a tensor lie in its file, to read them past HDF5, which copies each chunk once more.

Only layouts that hold the values as they are come into question: one stretch of bytes, or chunks with at most
a checksum behind each, which is verified here as HDF5 would. Everything else is left to HDF5.

Letters: N rows of a tensor, W its width.
"""

from __future__ import annotations

import os
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from hsprobe.trace.checksum import LENGTH, Fletcher32

Array = npt.NDArray[Any]

TILE_BYTES = 1 << 19
"""What is read at once of a tensor that is stored in one stretch."""
# Smaller chunks are read faster by HDF5, and larger ones would not fit the cache, nor many of them memory.
_LEAST_CHUNK, _MOST_CHUNK = 1 << 12, 4 << 20


class Extents:
    """The tiles of a dataset: stored chunks, or as many whole rows of a contiguous one as make a good read.

    Attributes:
        rows, columns: of one tile; those at the edges are cut. across: tiles side by side.
        chunked: whether tiles are stored chunks, of which HDF5 too reads all for a single row.
    """

    def __init__(self, data: h5py.Dataset, rows: int, columns: int, offsets: Array | None) -> None:
        """`offsets`: [tiles down, tiles across] where each stored chunk begins, None for one stretch."""
        self.rows, self.columns = rows, columns
        self.dtype: np.dtype[Any] = data.dtype
        self.shape: tuple[int, int] = data.shape
        self.across = -(-data.shape[1] // columns)
        self._start = 0 if offsets is not None else int(data.id.get_offset())
        self._offsets = offsets
        self.chunked = offsets is not None
        self._checked = bool(data.fletcher32)
        self._descriptor = int(data.file.id.get_vfd_handle())

    @property
    def tile_bytes(self) -> int:
        """What a buffer for one tile has to hold."""
        return self.rows * self.columns * self.dtype.itemsize + LENGTH

    def read(self, row: int, column: int, buffer: npt.NDArray[np.uint8], sums: Fletcher32) -> Array | None:
        """A tile, in `buffer`; None where the file does not hold it as it should.

        Any thread may read, with a buffer of its own.

        Args:
            row, column: how many tiles down and across.
        """
        (top, bottom), (left, right) = self.bounds(row, column)
        height, width = bottom - top, right - left
        if self._offsets is None:
            size = height * width * self.dtype.itemsize
            if not _fill(self._descriptor, buffer[:size], self._start + row * self.tile_bytes_plain):
                return None
            return buffer[:size].view(self.dtype).reshape(height, width)
        size = self.tile_bytes_plain
        whole = size + LENGTH * self._checked
        if not _fill(self._descriptor, buffer[:whole], int(self._offsets[row, column])):
            return None
        if self._checked and not sums.matches(buffer[:size], buffer[size:whole].tobytes()):
            return None
        return buffer[:size].view(self.dtype).reshape(self.rows, self.columns)[:height, :width]

    def bounds(self, row: int, column: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """(first, end) of the rows and of the columns of a tile."""
        low, left = row * self.rows, column * self.columns
        return (low, min(low + self.rows, self.shape[0])), (left, min(left + self.columns, self.shape[1]))

    def expect(self, row: int, column: int) -> None:
        """Let the system fetch a tile from the disk that will soon be read."""
        if row * self.rows >= self.shape[0]:
            return
        if self._offsets is None:
            at = self._start + row * self.tile_bytes_plain
        else:
            at = int(self._offsets[row, column])
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, at, self.tile_bytes, os.POSIX_FADV_WILLNEED)

    @property
    def tile_bytes_plain(self) -> int:
        """Bytes of the values of a whole tile."""
        return self.rows * self.columns * self.dtype.itemsize


def _fill(descriptor: int, buffer: npt.NDArray[np.uint8], at: int) -> bool:
    """Read bytes from a place in the file; False if it ends before."""
    done, whole = 0, buffer.data
    while done < len(buffer):
        got = os.preadv(descriptor, [whole[done:]], at + done)
        if got <= 0:
            return False
        done += got
    return True


def extents(data: h5py.Dataset) -> Extents | None:
    """The extents of a dataset [N, W], None where HDF5 has to read it."""
    file = data.file
    plain = data.dtype.isnative or data.dtype.itemsize == 1
    if file.driver != "sec2" or file.userblock_size or not plain or 0 in data.shape:
        return None
    if data.chunks is None:
        # A dataset kept in its own header, or not yet written at all, has no offset.
        if data.id.get_offset() is None or data.id.get_storage_size() != data.size * data.dtype.itemsize:
            return None
        row_bytes = data.shape[1] * data.dtype.itemsize
        return Extents(data, max(1, TILE_BYTES // row_bytes), data.shape[1], None)
    return _chunked(data)


def _chunked(data: h5py.Dataset) -> Extents | None:
    rows, columns = data.chunks
    size = rows * columns * data.dtype.itemsize
    filters = data.id.get_create_plist().get_nfilters()
    if filters != int(bool(data.fletcher32)) or size % 4 or not _LEAST_CHUNK <= size <= _MOST_CHUNK:
        return None
    down, across = -(-data.shape[0] // rows), -(-data.shape[1] // columns)
    offsets = np.full((down, across), -1, np.int64)
    stored = size + LENGTH * filters

    def note(chunk: Any) -> None:
        row, column = chunk.chunk_offset
        if (
            chunk.size == stored
            and chunk.filter_mask == 0
            and row // rows < down
            and column // columns < across
        ):
            offsets[row // rows, column // columns] = chunk.byte_offset

    data.id.chunk_iter(note)
    return Extents(data, rows, columns, offsets) if bool((offsets >= 0).all()) else None
