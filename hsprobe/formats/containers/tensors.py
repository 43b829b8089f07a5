"""A safetensors file: a JSON header, then the bytes. Nothing is loaded but what is asked for.

Source: the format as documented by safetensors: 8 bytes length of the header, header, tensors without holes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import IO, Any

import numpy as np

from hsprobe.errors import HsprobeError
from hsprobe.formats.stored import Array, Bytes, Stored, check_shape, damaged, stored_at

_TYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "BOOL": "bool",
}
_MAX_HEADER = 64 << 20


def looks_like(first: bytes, size: int) -> bool:
    """Whether these first bytes of a file of `size` bytes may begin a safetensors file."""
    return len(first) > 8 and first[8:9] == b"{" and struct.unpack("<Q", first[:8])[0] + 8 <= size


def read(source: Bytes) -> dict[str, Any]:
    """The tensors by name, and the file's own metadata (strings) as `__metadata__`.

    Raises:
        HsprobeError: it is damaged.
    """
    length = struct.unpack("<Q", bytes(source.read(0, 8)))[0]
    if length > min(_MAX_HEADER, source.size - 8):
        raise damaged(source.name, "it is cut short, or no safetensors file")
    header = parse_json(bytes(source.read(8, length)), source.name)
    if not isinstance(header, dict):
        raise damaged(source.name, "its header makes no sense")
    found: dict[str, Any] = {"__metadata__": header.pop("__metadata__", {})}
    for name, entry in header.items():
        found[name] = _tensor(source, name, entry, 8 + length)
    return found


def _tensor(source: Bytes, name: str, entry: Any, base: int) -> Stored:
    place = f"{source.name}: {name[:80]}"
    try:
        dtype, (start, end) = _TYPES[entry["dtype"]], entry["data_offsets"]
        if not (isinstance(start, int) and isinstance(end, int) and 0 <= start <= end <= source.size - base):
            raise damaged(place, "it is cut short")
        shape = check_shape(place, entry["shape"], dtype, end - start)
    except (KeyError, TypeError, ValueError):
        raise damaged(place, "its entry in the header makes no sense") from None
    return stored_at(place, source, base + start, shape, dtype)


def write(file: IO[bytes], found: Mapping[str, tuple[str, Array]], metadata: Mapping[str, str]) -> None:
    """Write tensors: name -> (element type, its bits).

    Raises:
        HsprobeError: an element type has no name in this format.
    """
    names = {dtype: name for name, dtype in _TYPES.items()}
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name, (dtype, bits) in found.items():
        if dtype not in names:
            raise HsprobeError(f"safetensors has no {dtype}.", "Convert to a trace instead.")
        header[name] = {
            "dtype": names[dtype],
            "shape": list(bits.shape),
            "data_offsets": [at, at + bits.nbytes],
        }
        at += bits.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for _, bits in found.values():
        file.write(np.ascontiguousarray(bits).data)


def parse_json(data: bytes, name: str) -> Any:
    """A JSON document.

    Raises:
        HsprobeError: it is none.
    """
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise damaged(name, "it is not JSON") from error
