"""The directory of a zip file, read without unpacking anything.

Only what torch and numpy write: one disk, no encryption; the directory is bounded before it is read.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from hsprobe.formats.stored import Bytes, damaged

MAGIC = b"PK\x03\x04"
STORED, DEFLATED = 0, 8
_MAX_DIRECTORY = 8 << 20
_MEMBER = struct.Struct("<8xHH8xIIHHH8xI")
_TAIL = 22 + 20 + 56 + 1024


@dataclass(frozen=True)
class Entry:
    """A member of a zip file.

    Attributes:
        method: STORED or DEFLATED. size: its bytes when unpacked; packed: in the file.
        header: where its header lies.
    """

    name: str
    method: int
    size: int
    packed: int
    header: int


def entries(source: Bytes) -> dict[str, Entry]:
    """The members by name.

    Raises:
        HsprobeError: it is not a whole zip file.
    """
    start = max(0, source.size - _TAIL)
    tail = bytes(source.read(start, source.size - start))
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or len(tail) - at < 22:
        raise damaged(source.name, "it is cut short")
    length, offset = struct.unpack_from("<II", tail, at + 12)
    if at >= 20 and tail[at - 20 : at - 16] == b"PK\x06\x07":
        where = struct.unpack_from("<Q", tail, at - 12)[0]
        record = bytes(source.read(where, 56))
        if record[:4] != b"PK\x06\x06":
            raise damaged(source.name, "its directory makes no sense")
        length, offset = struct.unpack_from("<QQ", record, 40)
    if length > _MAX_DIRECTORY:
        raise damaged(source.name, f"its directory alone takes {length:,} bytes")
    return _directory(bytes(source.read(offset, length)), source.name)


def _directory(data: bytes, name: str) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    at = 0
    try:
        while at < len(data):
            if data[at : at + 4] != b"PK\x01\x02":
                raise damaged(name, "its directory makes no sense")
            flags, method, packed, size, n_name, n_extra, n_comment, header = _MEMBER.unpack_from(data, at)
            raw = data[at + 46 : at + 46 + n_name]
            extra = data[at + 46 + n_name : at + 46 + n_name + n_extra]
            if 0xFFFFFFFF in (size, packed, header):
                size, packed, header = _wide(extra, size, packed, header)
            if flags & 1 or method not in (STORED, DEFLATED):
                raise damaged(name, "its members are encrypted, or packed in a way that torch never uses")
            found[raw.decode("utf-8", "replace")] = Entry(
                raw.decode("utf-8", "replace"), method, size, packed, header
            )
            at += 46 + n_name + n_extra + n_comment
    except struct.error:
        raise damaged(name, "its directory makes no sense") from None
    return found


def _wide(extra: bytes, *fields: int) -> tuple[int, int, int]:
    """Sizes and offset, from the 64-bit field where the 32-bit ones are full."""
    values = list(fields)
    at = 0
    while at + 4 <= len(extra):
        tag, count = struct.unpack_from("<HH", extra, at)
        if tag == 1:
            place = at + 4
            for index, value in enumerate(values):
                if value == 0xFFFFFFFF:
                    values[index] = struct.unpack_from("<Q", extra, place)[0]
                    place += 8
        at += 4 + count
    return values[0], values[1], values[2]


def data_offset(source: Bytes, entry: Entry) -> int:
    """Where the bytes of a member begin.

    Raises:
        HsprobeError: the member does not lie in the file whole.
    """
    header = bytes(source.read(entry.header, 30))
    if header[:4] != MAGIC:
        raise damaged(source.name, f"its member {entry.name[:60]!r} is not where its directory says")
    n_name, n_extra = struct.unpack_from("<HH", header, 26)
    offset = entry.header + 30 + int(n_name) + int(n_extra)
    if offset + entry.packed > source.size:
        raise damaged(source.name, "it is cut short")
    return offset


def stored_offset(source: Bytes, entry: Entry) -> int:
    """As `data_offset`, for a member that has to be stored as it is."""
    if entry.method != STORED or entry.packed != entry.size:
        raise damaged(source.name, f"its member {entry.name[:60]!r} is compressed, which torch never does")
    return data_offset(source, entry)
