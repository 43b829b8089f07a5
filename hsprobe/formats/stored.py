"""A tensor that still lies in its file: shape and type are known, values are read when asked for.

Letters: n rows of a read, W width of a row.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

from hsprobe.errors import HsprobeError
from hsprobe.trace.schema import STORAGE

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

BITS: dict[str, str] = {**STORAGE, "bool": "|u1", "uint16": "<u2", "uint32": "<u4", "uint64": "<u8"}
"""Element type of a tensor in a dump -> numpy code of the type that its bits are read as."""
FLOATS = frozenset(name for name in STORAGE if "float" in name)
"""Element types that hidden states may have."""
_HEAD, _TAIL = 8 << 10, 4 << 10
_MAX_AXES = 8
_MAX_ELEMENTS = 1 << 46
_AGAIN = "Write the sample again, or fetch a sound copy of it."


def damaged(name: str, why: str) -> HsprobeError:
    """The error for one file or sample that cannot be used; `why` is the end of a sentence."""
    return HsprobeError(f"{name} cannot be used: {why}.", _AGAIN)


class Bytes(Protocol):
    """Where bytes lie."""

    name: str
    size: int

    def read(self, offset: int, count: int) -> bytearray:
        """Exactly `count` bytes. Raises HsprobeError where there are fewer."""
        ...


class FileBytes:
    """The bytes of a regular file, opened for each read so that many thousands of them may be known at once.

    Its ends are kept, where torch, numpy and safetensors have what tells the rest.

    Raises:
        HsprobeError: there is no such file, or it is a pipe or a device.
    """

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.name = name or str(path)
        self._path = path
        file = self._open()
        try:
            self.size = os.fstat(file).st_size
            self._head = bytes(read_exactly(file, 0, min(self.size, _HEAD), self.size, self.name))
            self._from = max(len(self._head), self.size - _TAIL)
            rest = self.size - self._from
            self._tail = bytes(read_exactly(file, self._from, rest, self.size, self.name)) if rest else b""
        finally:
            os.close(file)

    def _open(self) -> int:
        try:
            # Without blocking, because a pipe would wait for its writer.
            file = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise damaged(self.name, f"it cannot be read ({reason})") from error
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise damaged(self.name, "it is not a regular file")
        return file

    def read(self, offset: int, count: int) -> bytearray:
        """See `Bytes`."""
        if offset >= 0 and count >= 0 and offset + count <= len(self._head):
            return bytearray(self._head[offset : offset + count])
        if self._from <= offset and count >= 0 and offset + count <= self.size:
            return bytearray(self._tail[offset - self._from : offset - self._from + count])
        file = self._open()
        try:
            return read_exactly(file, offset, count, self.size, self.name)
        finally:
            os.close(file)


def read_exactly(file: int, offset: int, count: int, size: int, name: str) -> bytearray:
    """`count` bytes of an open file of `size` bytes."""
    if offset < 0 or count < 0 or offset + count > size:
        raise damaged(name, "it is cut short")
    out = bytearray(count)
    view, done = memoryview(out), 0
    while done < count:
        try:
            got = os.preadv(file, [view[done:]], offset + done)
        except OSError as error:
            raise damaged(name, f"it cannot be read ({error.strerror})") from error
        if not got:
            raise damaged(name, "it is cut short")
        done += got
    return out


@dataclass(frozen=True)
class Stored:
    """A tensor in a file.

    Attributes:
        name: file and place, for messages.
        shape: its axes.
        dtype: element type, a key of `BITS`.
        fetch: (first, count) -> that many elements, flat and row-major, in the type of `BITS[dtype]`.
        first: where this tensor begins in what `fetch` knows.
        dense: whether its elements lie side by side in the file, not as a part of something wider.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    fetch: Callable[[int, int], Array]
    first: int = 0
    dense: bool = True

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def is_float(self) -> bool:
        return self.dtype in FLOATS

    def read(self, start: int = 0, stop: int | None = None) -> Array:
        """Entries start..stop of the first axis, all others whole, bit for bit (bfloat16 as uint16).

        Raises:
            HsprobeError: the file is damaged there.
        """
        if not self.shape:
            return self.fetch(self.first, 1).reshape(())
        stop = self.shape[0] if stop is None else min(stop, self.shape[0])
        start = min(max(0, start), stop)
        each = math.prod(self.shape[1:])
        flat = self.fetch(self.first + start * each, (stop - start) * each)
        return flat.reshape((stop - start, *self.shape[1:]))

    def integers(self) -> Ints:
        """All of it, flat, as int64, for token ids and masks.

        Raises:
            HsprobeError: it holds no integers.
        """
        if self.is_float:
            raise damaged(self.name, f"it holds {self.dtype} where integers belong")
        return self.fetch(self.first, self.size).astype(np.int64)

    def reshape(self, shape: Sequence[int]) -> Stored:
        """The same elements with other axes.

        Raises:
            HsprobeError: the number of elements differs.
        """
        if math.prod(shape) != self.size:
            raise damaged(self.name, f"its shape {list(self.shape)} is not understood")
        return replace(self, shape=tuple(shape))

    def at(self, index: int) -> Stored:
        """One entry of the first axis."""
        each = math.prod(self.shape[1:])
        return replace(self, shape=self.shape[1:], first=self.first + index * each)

    def rows(self, start: int, stop: int) -> Stored:
        """Entries start..stop of the first axis, as a tensor of its own."""
        each = math.prod(self.shape[1:])
        return replace(self, shape=(stop - start, *self.shape[1:]), first=self.first + start * each)


def check_shape(name: str, shape: Sequence[object], dtype: str, available: int) -> tuple[int, ...]:
    """The shape, once it is known to be sane and its elements to lie in `available` bytes.

    Raises:
        HsprobeError: it is absurd, or claims more than there is.
    """
    if len(shape) > _MAX_AXES or not all(isinstance(n, int) and 0 <= n < _MAX_ELEMENTS for n in shape):
        raise damaged(name, "its shape is absurd")
    sizes = tuple(int(n) for n in shape if isinstance(n, int))
    claimed = math.prod(sizes) * np.dtype(BITS[dtype]).itemsize
    if math.prod(sizes) > _MAX_ELEMENTS or claimed > available:
        raise damaged(name, f"it claims {claimed:,} bytes and holds {available:,}")
    return sizes


def stored_at(
    name: str, source: Bytes, offset: int | Callable[[], int], shape: tuple[int, ...], dtype: str
) -> Stored:
    """A tensor that lies row-major in `source` from byte `offset` on, which may be found out when needed."""
    code = np.dtype(BITS[dtype])

    def fetch(first: int, count: int) -> Array:
        begin = offset if isinstance(offset, int) else offset()
        raw = source.read(begin + first * code.itemsize, count * code.itemsize)
        return np.frombuffer(raw, code)

    return Stored(name, shape, dtype, fetch)


def stored_array(name: str, array: Array, dtype: str) -> Stored:
    """A tensor that is in memory already; `array` in the type of `BITS[dtype]`."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return Stored(name, array.shape, dtype, lambda first, count: flat[first : first + count])


def as_floats(bits: Array, dtype: str) -> Floats:
    """Bits of an element type as float32."""
    if bits.dtype.kind != "f":
        bits = bits.view(np.dtype(getattr(ml_dtypes, dtype)))
    with np.errstate(over="ignore", invalid="ignore"):
        return bits.astype(np.float32)
