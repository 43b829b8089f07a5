"""A gzip stream, unpacked into a file without a name; what it unpacks to is bounded."""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Iterator
from typing import IO

from hsprobe.formats.stored import Bytes, damaged, read_exactly

MAGIC = b"\x1f\x8b"
MAX_BYTES = 8 << 30
"""More than any sample: 100,000 tokens of four states of 8,192 channels in two bytes take 6.6 GB."""
_MAX_RATIO, _FREE = 200, 64 << 20
_PIECE = 1 << 20


class UnpackedBytes:
    """What a gzip stream unpacks to.

    Raises:
        HsprobeError: the stream is damaged, or grows out of all proportion.
    """

    def __init__(self, source: Bytes, limit: int | None = None) -> None:
        self.name = source.name
        self._file: IO[bytes] = tempfile.TemporaryFile(prefix="hsprobe-")  # noqa: SIM115
        self.size = 0
        for piece in unpack(source):
            self._file.write(piece)
            self.size += len(piece)
            if limit is not None and self.size >= limit:
                break
        self._file.flush()

    def read(self, offset: int, count: int) -> bytearray:
        """See `Bytes`."""
        return read_exactly(self._file.fileno(), offset, count, self.size, self.name)


def unpack(source: Bytes) -> Iterator[bytes]:
    """The content of a gzip stream, piece by piece.

    Raises:
        HsprobeError: the stream is damaged, or grows out of all proportion.
    """
    most = min(MAX_BYTES, max(_FREE, source.size * _MAX_RATIO))
    machine = zlib.decompressobj(wbits=31)
    done = at = 0
    try:
        while not machine.eof:
            data = machine.unconsumed_tail
            if not data:
                count = min(_PIECE, source.size - at)
                if count <= 0:
                    raise damaged(source.name, "it is cut short")
                data = bytes(source.read(at, count))
                at += count
            piece = machine.decompress(data, _PIECE)
            done += len(piece)
            if done > most:
                raise damaged(source.name, f"it unpacks to more than {most:,} bytes")
            yield piece
    except zlib.error as error:
        raise damaged(source.name, "its compressed bytes make no sense") from error
