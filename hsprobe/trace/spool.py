"""The spool: an append-only file of checksummed records that a probe writes inside a server process.

A frame is `magic, header length, payload length, crc32` (20 bytes, little-endian), then the header as JSON
`[kind, {...}]`, then the payload. The checksum covers the two lengths, the header and the payload. No frame
refers to another, so whatever was flushed before a crash stays readable. Standard library only, as this runs
inside the server.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from types import TracebackType
from typing import Any, BinaryIO, Self

from hsprobe.errors import HsprobeError

MAGIC = b"HSPF"
_HEAD = Struct("<4sIQI")
_LENGTHS = Struct("<IQ")
_BUFFER_LIMIT = 1 << 18
"""Bytes held back before they go to the file: one system call for many small records."""
_MAX_HEADER = 1 << 26
_MOST_VIEWS = 512

Payload = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Record:
    """One record of a spool; `end` is the file offset just after it, where reading can resume."""

    kind: str
    header: dict[str, Any]
    payload: bytes
    end: int


class SpoolWriter:
    """Appends records to a spool that only this process writes. Safe to call from several threads.

    An existing spool is continued; a torn record that a crash left at its end is cut off first. Records are
    certain to survive the death of this process once `flush` has returned. The file has mode 0600.

    Raises:
        HsprobeError: the path holds something that is not a spool, or another process is writing it.
        OSError: the file cannot be opened or written. The spool stays readable up to the last good record.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        self._buffer = bytearray()
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(self.path, flags, 0o600)
        try:
            self._claim()
            self._end = self._sound_end()
            os.ftruncate(self._fd, self._end)
            os.lseek(self._fd, self._end, os.SEEK_SET)
        except BaseException:
            os.close(self._fd)
            self._fd = -1
            raise

    def _claim(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise HsprobeError(
                f"{self.path} is being written by another process.", "Give each process a spool of its own."
            ) from None

    def _sound_end(self) -> int:
        if os.fstat(self._fd).st_size == 0:
            return 0
        reader = SpoolReader(self.path)
        for _ in reader:
            pass
        return reader.end

    def append(self, kind: str, header: dict[str, Any], payload: Payload | Sequence[Payload] = b"") -> None:
        """Add one record.

        Args:
            kind: what the record is ("pass", "tensor", ...).
            header: anything JSON can hold.
            payload: C-contiguous bytes, in one piece or several that are written back to back.

        Raises:
            OSError: the file could not be written; records since the last flush may be lost.
            ValueError: the writer is closed.
        """
        self.append_frame(frame_of(kind, header, payload))

    def append_frame(self, frame: Sequence[memoryview]) -> None:
        """Add what `frame_of` gave, as `append` does."""
        with self._lock:
            self._require_open()
            if len(self._buffer) + sum(view.nbytes for view in frame) < _BUFFER_LIMIT:
                for view in frame:
                    self._buffer += view
            else:
                self._drain()
                self._write(list(frame))

    def flush(self) -> None:
        """Hand every record so far to the operating system: from here the death of this process loses none.

        Raises:
            OSError: the file could not be written.
            ValueError: the writer is closed.
        """
        with self._lock:
            self._require_open()
            self._drain()

    def close(self) -> None:
        """Flush and close. Closing twice is harmless."""
        with self._lock:
            if self._fd < 0:
                return
            try:
                self._drain()
            finally:
                os.close(self._fd)
                self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._fd < 0:
            raise ValueError(f"spool {self.path} is closed")

    def _drain(self) -> None:
        if self._buffer:
            buffered, self._buffer = self._buffer, bytearray()
            self._write([memoryview(buffered)])

    def _write(self, views: list[memoryview]) -> None:
        try:
            left = [view for view in views if view]
            while left:
                # One call for all: a server's other threads are held up by each one.
                written = os.writev(self._fd, left[:_MOST_VIEWS])
                while left and written >= left[0].nbytes:
                    written -= left.pop(0).nbytes
                if written:
                    left[0] = left[0][written:]
        except OSError:
            # A full disk must not leave half a frame that would hide every record after it.
            os.ftruncate(self._fd, self._end)
            os.lseek(self._fd, self._end, os.SEEK_SET)
            raise
        self._end = os.lseek(self._fd, 0, os.SEEK_CUR)


def frame_of(
    kind: str, header: dict[str, Any], payload: Payload | Sequence[Payload] = b""
) -> list[memoryview]:
    """A record as it lies in the file; its last parts are the payload itself (see `SpoolWriter.append`)."""
    pieces = [payload] if isinstance(payload, (bytes, bytearray, memoryview)) else payload
    views = [memoryview(piece).cast("B") for piece in pieces if memoryview(piece).nbytes]
    text = json.dumps([kind, header], separators=(",", ":")).encode()
    lengths = _LENGTHS.pack(len(text), sum(view.nbytes for view in views))
    crc = zlib.crc32(text, zlib.crc32(lengths))
    for view in views:
        crc = zlib.crc32(view, crc)
    return [memoryview(MAGIC + lengths + crc.to_bytes(4, "little") + text), *views]


class SpoolReader:
    """Iterates over the records of a spool, one in memory at a time, and stops before the first damaged one.

    The file may still be growing: what is whole when its turn comes is read.

    Args:
        path: the spool.
        start: file offset of a record, 0 or a `Record.end`.

    Attributes:
        end: offset after the last good record.
        torn: True once iteration has stopped at bytes that are not a whole, sound record.
    """

    def __init__(self, path: Path | str, start: int = 0) -> None:
        self.path = Path(path)
        self.end = start
        self.torn = False

    def __iter__(self) -> Iterator[Record]:
        try:
            file = self.path.open("rb")
        except OSError as error:
            raise HsprobeError(
                f"The spool {self.path} cannot be opened: {error.strerror}.",
                "Give the path of a spool that a probe wrote.",
            ) from error
        with file:
            self._require_spool(file)
            file.seek(self.end)
            while (record := self._next(file)) is not None:
                self.end = record.end
                yield record

    def _require_spool(self, file: BinaryIO) -> None:
        first = file.read(len(MAGIC))
        if first != MAGIC[: len(first)]:
            raise HsprobeError(
                f"{self.path} is not a spool of hsprobe.", "Give the path of a spool that a probe wrote."
            )

    def _next(self, file: BinaryIO) -> Record | None:
        left = os.fstat(file.fileno()).st_size - self.end
        if left == 0:
            return None
        self.torn = True
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            return None
        magic, header_size, payload_size, crc = _HEAD.unpack(head)
        # Lengths are checked against the file before anything is allocated for them.
        if magic != MAGIC or header_size > _MAX_HEADER or header_size + payload_size > left - _HEAD.size:
            return None
        text = file.read(header_size)
        payload = file.read(payload_size)
        if zlib.crc32(payload, zlib.crc32(text, zlib.crc32(head[4:16]))) != crc:
            return None
        content = _parse(text)
        if content is None:
            return None
        self.torn = False
        return Record(content[0], content[1], payload, self.end + _HEAD.size + header_size + payload_size)


def wait_until_closed(path: Path, seconds: float) -> bool:
    """Wait until nobody writes a spool any more; whether that came about in time."""
    deadline = time.monotonic() + seconds
    try:
        with path.open("rb") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        return False
                    time.sleep(0.02)
                else:
                    return True
    except FileNotFoundError:
        return True


def _parse(text: bytes) -> tuple[str, dict[str, Any]] | None:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    match content:
        case [str(kind), dict(header)]:
            return kind, header
    return None


def read_spool(path: Path | str, start: int = 0) -> Iterator[Record]:
    """The records of a spool from a file offset on, up to the first torn or damaged one (see `SpoolReader`).

    Raises:
        HsprobeError: the file cannot be opened or is not a spool.
    """
    return iter(SpoolReader(path, start))
