"""Reads the folder of a model that nobody vouches for: its config and the headers of its weights, bounded.

Nothing is unpickled, no length is believed before it is checked, and no link leads out of the folder, except
into the `blobs` beside the `snapshots` of a Hugging Face cache, where such folders keep their files.
"""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsprobe.errors import HsprobeError

CONFIG_BYTES = 4 << 20
INDEX_BYTES = 64 << 20
HEADER_BYTES = 64 << 20
TENSOR_BYTES = 16 << 20
"""Most bytes of a tensor whose contents are read."""
_MOST_FILES = 4096
_LFS = b"version https://git-lfs"

ITEM_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16,
    "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "F4": 4,
}  # fmt: skip
_NUMBERS: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype("|u1"), "U8": np.dtype("|u1"), "I8": np.dtype("|i1"), "I16": np.dtype("<i2"),
    "I32": np.dtype("<i4"), "I64": np.dtype("<i8"),
}  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """A tensor of a safetensors file: `start` and `stop` are byte offsets in the file."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Weights:
    """What is known of the weights without reading them.

    Attributes:
        tensors: name -> where it is; only those whose headers were read.
        named: names of all tensors, from the index where there is one.
        files: safetensors files that are there. others: pickled files, which are not opened.
        missing: files that the index names and that are not there.
    """

    tensors: dict[str, Stored]
    named: frozenset[str]
    files: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def readable(self) -> bool:
        """Whether the tensors are known."""
        return bool(self.named) and not self.missing


def folder(path: Path) -> Path:
    """The model's folder, links resolved.

    Raises:
        HsprobeError: there is none, or it has no config.json.
    """
    try:
        found = path.resolve(strict=True)
    except (OSError, RuntimeError, ValueError):
        raise HsprobeError(f"There is no folder {path}.", "Give the folder of a model.") from None
    if not found.is_dir():
        raise HsprobeError(f"{path} is not a folder.", "Give the folder of a model, with its config.json.")
    return found


def document(home: Path, name: str, most: int) -> dict[str, Any]:
    """A JSON object in a folder.

    Raises:
        HsprobeError: it is missing, too large, no JSON object, or lies elsewhere.
    """
    path = _inside(home, name)
    raw = _read(path, most)
    if raw.startswith(_LFS):
        raise HsprobeError(f"{path} is a Git LFS pointer, not the file itself.", "Fetch it: git lfs pull.")
    return _object(raw, str(path))


def weights(home: Path, wanted: Iterable[str] | None = None) -> Weights:
    """The safetensors headers of a folder.

    Args:
        wanted: names of the tensors to look up; None for all. With an index only their files are opened.

    Raises:
        HsprobeError: a header or the index makes no sense.
    """
    names = _listing(home)
    others = tuple(n for n in names if n.endswith((".bin", ".pt", ".pth")) and "training_args" not in n)
    shards = [n for n in names if n.endswith(".safetensors")]
    index = "model.safetensors.index.json"
    if index in names:
        placed = _weight_map(home, index)
        used = set(placed.values()) if wanted is None else {placed[n] for n in wanted if n in placed}
        missing = tuple(sorted(set(placed.values()) - set(shards)))
        tensors = _headers(home, sorted(used & set(shards)))
        return Weights(tensors, frozenset(placed), tuple(shards), others, missing)
    tensors = _headers(home, shards)
    return Weights(tensors, frozenset(tensors), tuple(shards), others)


def numbers(stored: Stored) -> NDArray[np.int64] | None:
    """The contents of a small tensor of integers or booleans, in its shape; None for any other.

    Raises:
        HsprobeError: the file cannot be read.
    """
    kind = _NUMBERS.get(stored.dtype)
    if kind is None or stored.stop - stored.start > TENSOR_BYTES:
        return None
    try:
        with stored.file.open("rb") as stream:
            stream.seek(stored.start)
            raw = stream.read(stored.stop - stored.start)
    except OSError as error:
        raise _unreadable(stored.file, error) from error
    if len(raw) != stored.stop - stored.start:
        raise _cut_short(stored.file)
    found: NDArray[np.int64] = np.frombuffer(raw, kind).astype(np.int64).reshape(stored.shape)
    return found


def _listing(home: Path) -> list[str]:
    try:
        names = sorted(path.name for path in home.iterdir())
    except OSError as error:
        raise _unreadable(home, error) from error
    if len(names) > _MOST_FILES:
        raise HsprobeError(f"{home} holds {len(names)} files.", "Give the folder of a single model.")
    return names


def _inside(home: Path, name: str) -> Path:
    """A regular file of the folder, links resolved."""
    path = home / name
    try:
        found = path.resolve(strict=True)
        mode = found.stat().st_mode
    except FileNotFoundError:
        raise HsprobeError(f"There is no {name} in {home}.", "Give the folder of a model.") from None
    except (OSError, RuntimeError, ValueError) as error:
        raise HsprobeError(f"{path} cannot be read.", "Give the folder of a model.") from error
    cache = home.parents[1] / "blobs" if len(home.parents) > 1 and home.parent.name == "snapshots" else home
    if not (found.is_relative_to(home) or found.is_relative_to(cache)):
        raise HsprobeError(
            f"{path} is a link that leads out of its folder.", "Copy the file into the model's folder."
        )
    if not stat.S_ISREG(mode):
        raise HsprobeError(f"{path} is not a regular file.", "Give the folder of a model.")
    return found


def _read(path: Path, most: int) -> bytes:
    try:
        with path.open("rb") as stream:
            raw = stream.read(most + 1)
    except OSError as error:
        raise _unreadable(path, error) from error
    if len(raw) > most:
        raise HsprobeError(f"{path} is larger than {most >> 20} MiB.", "Check that it is the right file.")
    return raw


def _object(raw: bytes, what: str) -> dict[str, Any]:
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        raise HsprobeError(f"{what} is not JSON.", "Fetch a sound copy of the file.") from None
    if not isinstance(found, dict):
        raise HsprobeError(
            f"{what} holds a {type(found).__name__}, not an object.", "Fetch a sound copy of the file."
        )
    return found


def _weight_map(home: Path, index: str) -> dict[str, str]:
    placed = document(home, index, INDEX_BYTES).get("weight_map")
    if not isinstance(placed, dict):
        raise HsprobeError(f"{home / index} has no weight_map.", "Fetch a sound copy of the file.")
    for name, file in placed.items():
        plain = isinstance(file, str) and file == Path(file).name and file.endswith(".safetensors")
        if not plain or not name.isprintable():
            raise HsprobeError(
                f"{home / index} names a file that cannot be one of the folder's: {str(file)[:60]!r}.",
                "Fetch a sound copy of the file.",
            )
    return placed


def _headers(home: Path, files: Iterable[str]) -> dict[str, Stored]:
    found: dict[str, Stored] = {}
    for file in files:
        path = _inside(home, file)
        for stored in _header(path):
            if stored.name in found:
                raise HsprobeError(
                    f"{stored.name} is in {found[stored.name].file.name} and in {path.name}.",
                    "Remove the file that does not belong to the model.",
                )
            found[stored.name] = stored
    return found


def _header(path: Path) -> list[Stored]:
    """Source: the format as safetensors describes it: 8 bytes of length, JSON, then the tensors' bytes."""
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            first = stream.read(8)
            length = int.from_bytes(first, "little")
            if first + stream.read(len(_LFS) - 8) == _LFS:
                raise HsprobeError(
                    f"{path} is a Git LFS pointer, not the file itself.", "Fetch it: git lfs pull."
                )
            if len(first) < 8 or length > size - 8:
                raise _cut_short(path)
            if length > HEADER_BYTES:
                raise HsprobeError(
                    f"The header of {path} is larger than {HEADER_BYTES >> 20} MiB.", "Check the file."
                )
            stream.seek(8)
            raw = stream.read(length)
    except OSError as error:
        raise _unreadable(path, error) from error
    entries = _object(raw, f"The header of {path}")
    entries.pop("__metadata__", None)
    return [_stored(path, name, entry, 8 + length, size) for name, entry in entries.items()]


def _stored(path: Path, name: str, entry: Any, base: int, size: int) -> Stored:
    shape = entry.get("shape") if isinstance(entry, dict) else None
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    dtype = entry.get("dtype") if isinstance(entry, dict) else None
    if not (name.isprintable() and _naturals(shape) and _naturals(offsets) and isinstance(dtype, str)):
        raise HsprobeError(f"The header of {path} makes no sense at {name[:60]!r}.", "Fetch a sound copy.")
    assert isinstance(shape, list)
    assert isinstance(offsets, list)
    if len(offsets) != 2 or offsets[0] > offsets[1] or not dtype.isprintable() or len(dtype) > 20:
        raise HsprobeError(f"The header of {path} makes no sense at {name[:60]!r}.", "Fetch a sound copy.")
    start, stop = base + offsets[0], base + offsets[1]
    if stop > size:
        raise _cut_short(path)
    bits = ITEM_BITS.get(dtype)
    if bits is not None and math.prod(shape) * bits != 8 * (stop - start):
        raise HsprobeError(
            f"{name} in {path} has {stop - start} bytes, which is not its shape {shape} of {dtype}.",
            "Fetch a sound copy of the file.",
        )
    return Stored(name, path, dtype, tuple(shape), start, stop)


def _naturals(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= 8
        and all(isinstance(one, int) and not isinstance(one, bool) and 0 <= one < 1 << 48 for one in value)
    )


def _cut_short(path: Path) -> HsprobeError:
    return HsprobeError(f"{path} is cut short, or no safetensors file.", "Fetch a sound copy of the file.")


def _unreadable(path: Path, error: OSError) -> HsprobeError:
    return HsprobeError(f"{path} cannot be read: {error.strerror or error}.", "Check the folder.")
