"""Data sets of an HDF5 file that is no trace. Hard links only, nothing in other files, sizes bounded.

Only numbers of fixed size are read: HDF5 itself can search a damaged heap of strings for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import h5py
import numpy as np

from hsprobe.formats.stored import BITS, Array, Stored, check_shape, damaged
from hsprobe.remote.location import Location
from hsprobe.remote.stream import open_hdf5

_MAX_LISTED = 100_000
_MAX_DEEP = 8
_MAX_CHUNK = 256 << 20
# No deflate stream unpacks to more than 1,032 times its size.
_MAX_RATIO = 1032


class Hdf5:
    """An open file; a context manager is not needed, it closes with the last reference."""

    def __init__(self, path: Location, name: str) -> None:
        self.name = name
        with self._sound():
            self._file = open_hdf5(path)

    def members(self, group: str) -> list[str]:
        """Names in a group, natural order left to the caller."""
        with self._sound():
            found = self._item(group)
            if not isinstance(found, h5py.Group):
                raise damaged(self.name, f"{group[:60]!r} is not a group")
            if len(found) > _MAX_LISTED:
                raise damaged(self.name, f"{group[:60]!r} has {len(found):,} members")
            return [str(one) for one in found]

    def datasets(self, most: int = 12) -> list[str]:
        """Paths of the first data sets, for messages."""
        found: list[str] = []
        waiting = [("", 0)]
        while waiting and len(found) < most:
            group, deep = waiting.pop(0)
            for name in self.members(group or "/")[:most]:
                path = f"{group}/{name}".lstrip("/")
                try:
                    item = self._item(path)
                except Exception:
                    continue
                if isinstance(item, h5py.Dataset) and path.isprintable():
                    found.append(path)
                elif isinstance(item, h5py.Group) and deep < _MAX_DEEP:
                    waiting.append((path, deep + 1))
        return found[:most]

    def get(self, path: str) -> Stored | None:
        """A data set, None where there is none of that name.

        Raises:
            HsprobeError: it is damaged, a link out of the file, or holds no numbers.
        """
        with self._sound():
            found = self._item(path)
        if found is None:
            return None
        place = f"{self.name}: {path[:80]}"
        if not isinstance(found, h5py.Dataset):
            raise damaged(place, "it is not a data set")
        with self._sound():
            dtype = _dtype(found, place)
            shape = _checked(found, dtype, place)
        return Stored(place, shape, dtype, self._fetch(found, dtype))

    def _fetch(self, found: h5py.Dataset, dtype: str) -> Any:
        shape, code = found.shape, np.dtype(BITS[dtype])

        def fetch(first: int, count: int) -> Array:
            if not count:
                return np.zeros(0, code)
            # The rows of the last axis that these elements lie in, whole.
            width = int(shape[-1]) if shape else 1
            low, high = first // width, (first + count - 1) // width + 1
            with self._sound():
                flat = np.concatenate(
                    [_row_block(found, shape, at, high) for at in _starts(shape, low, high)]
                )
            begin = first - low * width
            bits = flat.reshape(-1)[begin : begin + count]
            return bits.view(code) if bits.dtype != code else bits

        return fetch

    def _item(self, path: str) -> Any:
        item: Any = self._file
        for part in path.strip("/").split("/"):
            if not part:
                continue
            link = item.get(part, getlink=True) if isinstance(item, h5py.Group) else None
            if link is None:
                return None
            if not isinstance(link, h5py.HardLink):
                raise damaged(f"{self.name}: {path[:80]}", "it is a link that leads elsewhere")
            item = item[part]
        return item

    @contextmanager
    def _sound(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError, KeyError, ValueError, TypeError, AttributeError, MemoryError) as error:
            raise damaged(self.name, "HDF5 cannot read it") from error


def _starts(shape: tuple[int, ...], low: int, high: int) -> Iterator[int]:
    """Where blocks of rows begin that lie within one entry of all axes but the last two."""
    each = int(shape[-2]) if len(shape) > 1 else 1
    at = low
    while at < high:
        yield at
        at = (at // each + 1) * each


def _row_block(found: h5py.Dataset, shape: tuple[int, ...], at: int, high: int) -> Array:
    """Rows of the last axis from `at` on, to `high` or the end of their block. -> [n, width]"""
    if len(shape) < 2:
        return np.asarray(found[()]).reshape(1, -1)
    each = int(shape[-2])
    outer, inner = divmod(at, each)
    stop = min(each, inner + high - at)
    where = np.unravel_index(outer, shape[:-2]) if len(shape) > 2 else ()
    return np.asarray(found[(*map(int, where), slice(inner, stop))]).reshape(-1, int(shape[-1]))


def _dtype(found: h5py.Dataset, place: str) -> str:
    name = str(found.dtype)
    if found.dtype.kind == "b":
        name = "bool"
    if name not in BITS or found.dtype.byteorder == ">":
        raise damaged(place, "it does not hold plain little-endian numbers")
    return name


def _checked(found: h5py.Dataset, dtype: str, place: str) -> tuple[int, ...]:
    if found.is_virtual or found.external:
        raise damaged(place, "its data lies in another file")
    ratio = 1 if found.compression is None else _MAX_RATIO
    chunk = int(np.prod(found.chunks or (0,), dtype=np.float64)) * found.dtype.itemsize
    if chunk > _MAX_CHUNK:
        raise damaged(place, f"one chunk of it takes {chunk:,} bytes")
    return check_shape(place, tuple(map(int, found.shape)), dtype, found.id.get_storage_size() * ratio)
