"""Reads rows of a table tile by tile, in buffers that are kept: one cursor a side of a comparison.

Shapes: n rows of a tile, N of the table, H columns asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsprobe.trace.checksum import Fletcher32
from hsprobe.trace.extents import TILE_BYTES, Extents
from hsprobe.trace.tensor import Tensor

Rows = NDArray[np.int64]
Array = NDArray[Any]
Columns = tuple[int, int]

# How far ahead the system is asked to fetch, and how many bytes of tiles of one table are kept at most.
_AHEAD = 8
_MOST_KEPT = 32 << 20


class Layout:
    """How the rows of some tensors, one below the other, lie in tiles."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.starts = np.cumsum([0, *(len(tensor) for tensor in tensors)])
        self.heights = np.array([_height(tensor) for tensor in tensors], np.int64)

    def tiles(self, rows: Rows) -> Rows:
        """A number for the tile of each row; neighbours in one tile have the same. [n] -> [n]"""
        piece = np.searchsorted(self.starts, rows, side="right") - 1
        tile: Rows = (piece << 40) + (rows - self.starts[piece]) // self.heights[piece]
        return tile

    def piece(self, row: int) -> int:
        """Which tensor a row is in."""
        return int(np.searchsorted(self.starts, row, side="right")) - 1


def _height(tensor: Tensor) -> int:
    found = tensor.extents
    if found is not None:
        return found.rows
    return max(1, TILE_BYTES // max(1, tensor.shape[1] * tensor.itemsize))


class Cursor:
    """Reads rows of a table; what it returns holds until the next block is begun."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._sums = Fletcher32()
        self._kept: dict[tuple[int, int, int], tuple[Array, NDArray[np.uint8] | None]] = {}
        self._used: set[tuple[int, int, int]] = set()
        self._free: dict[int, list[NDArray[np.uint8]]] = {}
        self._rows = self._tiles = np.zeros(0, np.int64)
        self._one = False

    def begin(self, rows: Rows) -> None:
        """Begin a block of rows: tiles that the last one did not need are given up. [n]"""
        for key in self._kept.keys() - self._used:
            self._give_up(key)
        self._used = set()
        self._rows, self._tiles = rows, self._layout.tiles(rows)
        self._one = bool((self._tiles == self._tiles[0]).all() and (np.diff(rows) == 1).all())

    def columns(self, columns: Columns) -> Array:
        """Some columns of the rows, in the storage type. -> [n, H]

        Raises:
            HsprobeError: the file is damaged there.
        """
        if self._one:
            piece, first = self._place(int(self._rows[0]))
            return self._part(piece, first, len(self._rows), columns)
        return self._gathered(self._rows, self._tiles, columns)

    def _gathered(self, rows: Rows, tiles: Rows, columns: Columns) -> Array:
        """Rows of several tiles, put together."""
        out: Array | None = None
        for tile in np.unique(tiles):
            here = np.flatnonzero(tiles == tile)
            piece, low = self._place(int(rows[here].min()))
            high = int(rows[here].max()) - int(self._layout.starts[piece]) + 1
            part = self._part(piece, low, high - low, columns)
            if out is None:
                out = np.empty((len(rows), part.shape[1]), part.dtype)
            out[here] = part[rows[here] - int(self._layout.starts[piece]) - low]
        assert out is not None
        return out

    def _place(self, row: int) -> tuple[int, int]:
        piece = self._layout.piece(row)
        return piece, row - int(self._layout.starts[piece])

    def _part(self, piece: int, first: int, count: int, columns: Columns) -> Array:
        """Rows of one tile. -> [count, H]"""
        tensor = self._layout.tensors[piece]
        extents = tensor.extents
        if extents is None:
            return tensor.read_columns(first, first + count, *columns)
        down, low = divmod(first, extents.rows)
        parts = [
            self._tile(piece, extents, down, across)[low : low + count]
            for across in range(columns[0] // extents.columns, -(-columns[1] // extents.columns))
        ]
        begin = columns[0] // extents.columns * extents.columns
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
        return whole[:, columns[0] - begin : columns[1] - begin]

    def _tile(self, piece: int, extents: Extents, down: int, across: int) -> Array:
        key = (piece, down, across)
        self._used.add(key)
        if key in self._kept:
            return self._kept[key][0]
        # Rows that lie in tiles side by side need all of them at once.
        if len(self._kept) >= max(_MOST_KEPT // extents.tile_bytes, 2 * extents.across):
            self._give_up(next(iter(self._kept)))
        waiting = self._free.setdefault(extents.tile_bytes, [])
        buffer = waiting.pop() if waiting else np.empty(extents.tile_bytes, np.uint8)
        extents.expect(down + _AHEAD, across)
        tile = extents.read(down, across, buffer, self._sums)
        if tile is None:
            # Not what the file says of it: HDF5 tells what is wrong, or knows better.
            waiting.append(buffer)
            low, left = down * extents.rows, across * extents.columns
            tile = self._layout.tensors[piece].read_columns(
                low,
                min(low + extents.rows, extents.shape[0]),
                left,
                min(left + extents.columns, extents.shape[1]),
            )
            self._kept[key] = tile, None
        else:
            self._kept[key] = tile, buffer
        return tile

    def _give_up(self, key: tuple[int, int, int]) -> None:
        _, buffer = self._kept.pop(key)
        if buffer is not None:
            self._free.setdefault(len(buffer), []).append(buffer)
