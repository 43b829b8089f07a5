"""Bytes of one file behind a URL: small reads go through blocks that are kept, long ones do not.

All files of the process share the blocks, which take a bounded number of bytes.
"""

from __future__ import annotations

import atexit
import io
import tempfile
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py

from hsprobe.errors import HsprobeError
from hsprobe.remote.location import Entry, Location, Remote
from hsprobe.remote.trouble import RemoteError, explained, uncollected

BLOCK = 128 << 10
"""Bytes of a block; it holds the token ids of a sample with the rest of its head."""
CACHE_BYTES = 64 << 20
"""Most that all blocks kept take."""
_PAST_CACHE = 4 << 20
"""A read as long as this is not kept."""
_MOST_AHEAD = (8 << 20) // BLOCK
_Key = tuple[str, str, int]


class _Blocks:
    """Blocks by file and number; the one not used for longest goes first."""

    def __init__(self) -> None:
        self._kept: OrderedDict[_Key, bytes] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, key: _Key) -> bytes | None:
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
            return found

    def put(self, key: _Key, block: bytes) -> None:
        with self._lock:
            self._bytes += len(block) - len(self._kept.pop(key, b""))
            self._kept[key] = block
            while self._bytes > CACHE_BYTES:
                self._bytes -= len(self._kept.popitem(last=False)[1])


_blocks = _Blocks()


class RemoteFile:
    """A file behind a URL.

    Args:
        known: what a listing said of it, which spares asking.

    Attributes:
        size: its bytes.

    Raises:
        HsprobeError: there is no such file, or its server gives no ranges.
    """

    def __init__(self, where: Remote, known: Entry | None = None) -> None:
        found = known or where.entry()
        if found is None:
            raise HsprobeError(f"There is no file {where}.", "Check the URL.")
        if found.is_folder:
            raise HsprobeError(f"{where} is a folder, not a file.", "Give the URL of a file.")
        self.where, self.size, self.mark = where, found.size, found.mark
        if known is None:
            _require_ranges(where, self.size)
        self._expected, self._ahead = 0, 0

    def read(self, offset: int, count: int) -> bytearray:
        """Exactly `count` bytes, which have to be there.

        Raises:
            RemoteError: they cannot be had.
        """
        if count >= _PAST_CACHE:
            return bytearray(self.where.fetch(offset, offset + count))
        out = bytearray(count)
        at = offset
        while at < offset + count:
            number = at // BLOCK
            block = self._block(number, (offset + count - 1) // BLOCK)
            begin = at - number * BLOCK
            part = block[begin : begin + offset + count - at]
            out[at - offset : at - offset + len(part)] = part
            at += len(part)
        return out

    def _block(self, number: int, last: int) -> bytes:
        """One block; blocks up to `last` are fetched with it, and more where reading goes on and on."""
        found = _blocks.get(self._key(number))
        if found is not None:
            return found
        self._ahead = min(max(1, 2 * self._ahead), _MOST_AHEAD) if number == self._expected else 0
        stop = max(last, number + self._ahead) + 1
        self._expected = stop
        data = self.where.fetch(number * BLOCK, min(stop * BLOCK, self.size))
        self.keep(number, data)
        return data[:BLOCK]

    def keep(self, number: int, data: bytes) -> None:
        """Take in what begins at a block."""
        for begin in range(0, len(data), BLOCK):
            _blocks.put(self._key(number + begin // BLOCK), data[begin : begin + BLOCK])

    def has(self, number: int) -> bool:
        """Whether a block is kept."""
        return _blocks.get(self._key(number)) is not None

    def _key(self, number: int) -> _Key:
        return self.where.url, f"{self.size} {self.mark}", number


def fetch_ends(files: Sequence[RemoteFile]) -> None:
    """Fetch the first and the last block of small files' worth at once, as fast as the protocol allows.

    What cannot be fetched is left out: whoever reads it then learns why.
    """
    wanted = [
        (file, number)
        for file in files
        for number in sorted({0, (file.size - 1) // BLOCK})
        if file.size and not file.has(number)
    ]
    if len(wanted) < 2:
        return
    system = wanted[0][0].where.system()[0]
    starts = [number * BLOCK for _, number in wanted]
    stops = [min(start + BLOCK, file.size) for start, (file, _) in zip(starts, wanted, strict=True)]
    paths = [file.where.system()[1] for file, _ in wanted]
    try:
        with uncollected(), explained(str(files[0].where), "read"):
            found = system.cat_ranges(paths, starts, stops, on_error="return")
    except (RemoteError, FileNotFoundError):
        return
    for (file, number), data, start, stop in zip(wanted, found, starts, stops, strict=True):
        if isinstance(data, bytes) and len(data) == stop - start:
            file.keep(number, data)


class RemoteStream(io.RawIOBase):
    """A `RemoteFile` as Python's file object, for HDF5 and others that want one."""

    def __init__(self, file: RemoteFile) -> None:
        super().__init__()
        self.file = file
        self._at = 0

    def readable(self) -> bool:
        """See `io.RawIOBase`, as the others here."""
        return True

    def seekable(self) -> bool:
        """See there."""
        return True

    def tell(self) -> int:
        """See there."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """See there."""
        base = (0, self._at, self.file.size)[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        """See there."""
        view = memoryview(buffer).cast("B")
        count = min(len(view), max(0, self.file.size - self._at))
        if count:
            view[:count] = self.file.read(self._at, count)
        self._at += count
        return count


_opened: weakref.WeakSet[h5py.File] = weakref.WeakSet()


def open_hdf5(where: Location, **options: Any) -> h5py.File:
    """Open an HDF5 file for reading.

    Args:
        options: of `h5py.File`.

    Raises:
        HsprobeError, and what h5py raises.
    """
    if not isinstance(where, Remote):
        return h5py.File(where, "r", locking=False, **options)
    file = h5py.File(where.open(), "r", **options)
    # HDF5 crashes where Python ends before a file that it reads through Python is closed.
    _opened.add(file)
    return file


@atexit.register
def _close() -> None:
    for file in list(_opened):
        file.close()


@contextmanager
def local_copy(where: Location) -> Iterator[Path]:
    """A file that has to be local, for what maps it into memory: itself, or a copy that goes again."""
    if not isinstance(where, Remote):
        yield where
        return
    file = RemoteFile(where)
    with tempfile.NamedTemporaryFile(prefix="hsprobe-") as copy:
        for start in range(0, file.size, _PAST_CACHE):
            copy.write(where.fetch(start, min(start + _PAST_CACHE, file.size)))
        copy.flush()
        yield Path(copy.name)


def _require_ranges(where: Remote, size: int) -> None:
    """See that a web server gives a part of a file, before it is made to send all of a huge one."""
    if where.protocol not in ("http", "https"):
        return
    files, path = where.system()
    try:
        with uncollected(), explained(str(where), "read"):
            if not size:
                raise ValueError
            with files.open(path, "rb", size=size, block_size=BLOCK, cache_type="none") as file:
                file.seek(max(0, min(1, size - 1)))
                file.read(1)
    except FileNotFoundError:
        raise HsprobeError(f"There is no file {where}.", "Check the URL.") from None
    except RemoteError as error:
        if not isinstance(error.__cause__, ValueError):
            raise
        raise HsprobeError(
            f"The web server of {where} sends whole files only, and no ranges of bytes.",
            "Download the file, or put it where ranges are served (s3://, gs://, hf://, most web servers).",
        ) from error
