"""NumPy's `.npz` and `.npy` files, without pickle. What is packed is unpacked no further than its array."""

from __future__ import annotations

import io
import zlib
from typing import Any

import ml_dtypes
import numpy as np

from hsprobe.formats.containers import zipped
from hsprobe.formats.stored import BITS, Bytes, Stored, check_shape, damaged, stored_array, stored_at

MAGIC = b"\x93NUMPY"
_MAX_HEADER = 1 << 16
_MAX_UNPACKED = 8 << 30


def read_zip(source: Bytes, members: dict[str, zipped.Entry]) -> dict[str, Any]:
    """The arrays of an `.npz` by name. `members` are those of the zip that the file is.

    Raises:
        HsprobeError: it is damaged, or an array in it would have to be unpickled.
    """
    found = {}
    for name, entry in members.items():
        if name.endswith(".npy"):
            found[name.removesuffix(".npy")] = _member(source, entry)
    if not found:
        raise damaged(source.name, "it is a zip file without arrays in it")
    return found


def read_one(source: Bytes) -> Stored:
    """The array of an `.npy` file."""
    head = bytes(source.read(0, min(source.size, _MAX_HEADER)))
    shape, dtype, offset, turned = _header(head, source.name, source.size)
    if turned:
        raise damaged(source.name, "its array lies column by column")
    return stored_at(source.name, source, offset, shape, dtype)


def _member(source: Bytes, entry: zipped.Entry) -> Stored:
    place = f"{source.name}: {entry.name[:80]}"
    if entry.method == zipped.DEFLATED:
        return _unpacked(source, entry, place)
    base = zipped.stored_offset(source, entry)
    head = bytes(source.read(base, min(entry.size, _MAX_HEADER)))
    shape, dtype, offset, turned = _header(head, place, entry.size)
    if turned:
        raise damaged(place, "its array lies column by column")
    return stored_at(place, source, base + offset, shape, dtype)


def _unpacked(source: Bytes, entry: zipped.Entry, place: str) -> Stored:
    base = zipped.data_offset(source, entry)
    machine = zlib.decompressobj(wbits=-15)
    try:
        # Little is unpacked before the header has said how much there should be.
        packed = bytes(source.read(base, min(entry.packed, _MAX_HEADER)))
        shape, dtype, offset, turned = _header(machine.decompress(packed, _MAX_HEADER), place, entry.size)
    except zlib.error as error:
        raise damaged(place, "its compressed bytes make no sense") from error
    if turned:
        raise damaged(place, "its array lies column by column")
    # No deflate stream unpacks to more than 1,032 times its size.
    if entry.size > min(_MAX_UNPACKED, 1032 * entry.packed + 1024):
        raise damaged(place, f"it claims to unpack to {entry.size:,} bytes")

    def fetch(first: int, count: int) -> Any:
        code = np.dtype(BITS[dtype])
        try:
            whole = zlib.decompressobj(wbits=-15).decompress(
                bytes(source.read(base, entry.packed)), entry.size
            )
        except zlib.error as error:
            raise damaged(place, "its compressed bytes make no sense") from error
        flat = np.frombuffer(whole, np.uint8)[offset:]
        if len(flat) < (first + count) * code.itemsize:
            raise damaged(place, "it is cut short")
        return flat[first * code.itemsize : (first + count) * code.itemsize].view(code)

    return Stored(place, shape, dtype, fetch)


def _header(head: bytes, place: str, size: int) -> tuple[tuple[int, ...], str, int, bool]:
    """(shape, dtype, where the data begins, whether it lies column by column) of an array in npy form."""
    if head[:6] != MAGIC or len(head) < 12:
        raise damaged(place, "it is no array")
    file = io.BytesIO(head)
    try:
        # Untyped in numpy.
        npy: Any = np.lib.format
        old = npy.read_magic(file) == (1, 0)
        read = npy.read_array_header_1_0 if old else npy.read_array_header_2_0
        shape, turned, code = read(file, max_header_size=10_000)
    except Exception as error:  # numpy parses the header as Python, and a damaged one may end in any error
        raise damaged(place, "its header makes no sense") from error
    if code.hasobject:
        raise damaged(place, "its array holds Python objects, which are never unpickled")
    dtype = _dtype(code, place)
    offset = file.tell()
    return check_shape(place, shape, dtype, size - offset), dtype, offset, turned and len(shape) > 1


def _dtype(code: np.dtype[Any], place: str) -> str:
    if code.byteorder == ">":
        raise damaged(place, "its numbers are big-endian")
    name = str(code)
    if name == "|V2" or name == "V2":
        # numpy forgets the name of ml_dtypes' bfloat16 when it saves it.
        name = "bfloat16"
    if name not in BITS:
        raise damaged(place, f"its type {name[:40]} is not understood")
    return name


def as_stored(place: str, array: Any) -> Stored:
    """An array in memory, of a type that numpy or ml_dtypes knows."""
    name = str(array.dtype)
    if name not in BITS:
        raise damaged(place, f"its type {name[:40]} is not understood")
    bits = array.view(BITS[name]) if hasattr(ml_dtypes, name) or name == "bool" else array
    return stored_array(place, bits, name)
