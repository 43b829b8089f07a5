"""Reads HDF5 that nobody vouches for: every surprise becomes an `HsprobeError` that names file and place.

Only hard links are followed, so a trace cannot make its reader open another file; a dataset must have all its
declared bytes in this very file, so a few bytes cannot claim terabytes.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from hsprobe.errors import HsprobeError
from hsprobe.remote.location import Location, Remote
from hsprobe.remote.stream import open_hdf5
from hsprobe.trace import schema
from hsprobe.trace.spool import MAGIC as SPOOL_MAGIC

_HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
_AGAIN = "Capture it again, or fetch a sound copy of the file."
_MAX_MEMBERS = 100_000


@contextmanager
def sound(path: Location, place: str) -> Iterator[None]:
    """Turn whatever HDF5 raises while `place` of `path` is read into the error a person may see."""
    try:
        yield
    except HsprobeError:
        raise
    except (OSError, RuntimeError, KeyError, ValueError, TypeError, AttributeError, MemoryError) as error:
        mismatch = any(word in str(error).lower() for word in ("filter", "checksum"))
        reason = "its checksum does not match" if mismatch else "its bytes make no sense"
        raise HsprobeError(f"{path} is damaged at {place}: {reason}.", _AGAIN) from error


def damaged(path: Location, place: str, why: str) -> HsprobeError:
    """The error for a file that reads but contradicts itself."""
    return HsprobeError(f"{path} is damaged at {place}: {why}.", _AGAIN)


def open_file(path: Location) -> h5py.File:
    """Open a finished trace for reading: format, version and state are checked, the rest is not.

    Raises:
        HsprobeError: there is no such file, or it is not a finished trace of a version known here.
    """
    _require_hdf5(path)
    try:
        # A reader takes no lock: the file may lie on a file system without locks, or be read twice at once.
        # HDF5's chunk cache is kept for each of hundreds of tensors and never hit: readers take whole chunks.
        file = open_hdf5(path, rdcc_nbytes=0)
    except (OSError, RuntimeError, ValueError) as error:
        if "already open for write" in str(error):
            raise half_written(path) from error
        reason = "it is cut short" if "truncated" in str(error) else "HDF5 cannot read it"
        raise HsprobeError(f"{path} is damaged: {reason}.", _AGAIN) from error
    try:
        with sound(path, "its root"):
            _require_trace(path, file)
    except BaseException:
        file.close()
        raise
    return file


def half_written(path: Location) -> HsprobeError:
    """The error for a trace whose writer has not finished."""
    return HsprobeError(
        f"{path} is a half-written trace: its writer is still at work or was killed.",
        "Wait for the capture to end, or capture again.",
    )


def _require_hdf5(path: Location) -> None:
    try:
        if not isinstance(path, Remote):
            mode = path.stat().st_mode
            if stat.S_ISDIR(mode):
                raise HsprobeError(f"{path} is a folder, not a trace.", "Give the path of a trace file.")
            if not stat.S_ISREG(mode):
                raise HsprobeError(f"{path} is not a regular file.", "Give the path of a trace file.")
        with path.open("rb") as file:
            first = file.read(len(_HDF5_MAGIC))
    except FileNotFoundError:
        raise HsprobeError(
            f"There is no file {path}.", "Check the path; `hsprobe capture -o FILE` makes a trace."
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise HsprobeError(f"{path} cannot be read: {reason}.", "Give the path of a trace file.") from error
    if path.suffix == schema.PARTIAL_SUFFIX:
        raise half_written(path)
    if not first:
        raise HsprobeError(f"{path} is empty.", _AGAIN)
    if first.startswith(SPOOL_MAGIC):
        raise HsprobeError(
            f"{path} is the spool of one server process, not a trace.",
            "Give the trace that `hsprobe capture` made of the spools.",
        )
    if first != _HDF5_MAGIC:
        raise HsprobeError(
            f"{path} is not a trace: it is not an HDF5 file.", "Give a trace made by `hsprobe capture`."
        )


def _require_trace(path: Location, file: h5py.File) -> None:
    if text(file, "format", path) != schema.FORMAT:
        raise HsprobeError(
            f"{path} is an HDF5 file, but not a trace of hsprobe.", "Give a trace made by `hsprobe capture`."
        )
    version = integer(file, "schema_version", path)
    if version is None or version < 1:
        raise damaged(path, "schema_version", "it is not a version number")
    if version > schema.SCHEMA_VERSION:
        raise HsprobeError(
            f"{path} has trace schema {version}, and this hsprobe reads up to {schema.SCHEMA_VERSION}.",
            "Install a newer hsprobe to read it.",
        )
    state = text(file, "state", path)
    if state == schema.STATE_WRITING:
        raise half_written(path)
    if state not in (schema.STATE_COMPLETE, schema.STATE_RECOVERED):
        raise damaged(path, "state", "it is neither complete nor recovered")


def text(item: h5py.Group, name: str, path: Location) -> str | None:
    """A string attribute, None where there is none or it is something else."""
    value = _attribute(item, name, path, h5py.h5t.TypeStringID)
    return value.decode() if isinstance(value, bytes) else None


def integer(item: h5py.Group, name: str, path: Location) -> int | None:
    """An integer attribute, None where there is none or it is something else."""
    value = _attribute(item, name, path, h5py.h5t.TypeIntegerID)
    return int(value) if isinstance(value, np.integer) else None


def integers(item: h5py.Group, name: str, path: Location) -> list[int] | None:
    """An attribute that is a list of integers, None where there is none or it is something else."""
    value = _attribute(item, name, path, h5py.h5t.TypeIntegerID)
    return [int(one) for one in value] if isinstance(value, np.ndarray) and value.ndim == 1 else None


def _attribute(item: h5py.Group, name: str, path: Location, kind: type) -> Any:
    with sound(path, f"attribute {name} of {item.name}"):
        if name not in item.attrs:
            return None
        # The type is looked at before the value is: strings of variable length lie in a heap that has no
        # checksum, and HDF5 can search a damaged one for ever.
        stored = item.attrs.get_id(name).get_type()
        if not isinstance(stored, kind) or _is_variable(stored):
            return None
        return item.attrs[name]


def _is_variable(stored: Any) -> bool:
    return isinstance(stored, h5py.h5t.TypeStringID) and bool(stored.is_variable_str())


def group(parent: h5py.Group, name: str, path: Location) -> h5py.Group:
    """A member that has to be a group."""
    found = _member(parent, name, path)
    if not isinstance(found, h5py.Group):
        raise damaged(path, _at(parent, name), "it is not a group")
    return found


def members(parent: h5py.Group, path: Location) -> list[str]:
    """Names of the members of a group, checked fit to print."""
    with sound(path, str(parent.name)):
        if len(parent) > _MAX_MEMBERS:
            raise damaged(path, str(parent.name), f"it has {len(parent)} members")
        names = [str(name) for name in parent]
    if not all(name.isprintable() for name in names):
        raise damaged(path, str(parent.name), "the name of a member cannot be printed")
    return names


def dataset(parent: h5py.Group, name: str, path: Location, code: str, ndim: int) -> h5py.Dataset:
    """A member that has to be a dataset of numpy type `code` with `ndim` axes, all its bytes in this file."""
    found = _dataset(parent, name, path)
    place = _at(parent, name)
    with sound(path, place):
        if found.dtype != np.dtype(code):
            raise damaged(path, place, f"it holds {found.dtype}, not {np.dtype(code)}")
        if found.ndim != ndim:
            raise damaged(path, place, f"it has {found.ndim} axes, not {ndim}")
        _require_bytes(found, found.size * found.dtype.itemsize, path, place)
    return found


def column(parent: h5py.Group, name: str, path: Location, code: str) -> npt.NDArray[Any]:
    """All of a one-axis dataset."""
    found = dataset(parent, name, path, code, 1)
    with sound(path, _at(parent, name)):
        return np.asarray(found[()])


def strings(parent: h5py.Group, name: str, path: Location) -> list[str]:
    """All of a one-axis dataset of UTF-8 strings."""
    found = _text_dataset(parent, name, path, 1)
    with sound(path, _at(parent, name)):
        return [str(one) for one in found.asstr()[()]]


def document(parent: h5py.Group, name: str, path: Location) -> Any:
    """A scalar string dataset that holds JSON."""
    found = _text_dataset(parent, name, path, 0)
    place = _at(parent, name)
    with sound(path, place):
        try:
            return json.loads(found.asstr()[()])
        except (json.JSONDecodeError, RecursionError) as error:
            raise damaged(path, place, "it is not JSON") from error


def _text_dataset(parent: h5py.Group, name: str, path: Location, ndim: int) -> h5py.Dataset:
    found = _dataset(parent, name, path)
    place = _at(parent, name)
    with sound(path, place):
        kind = h5py.check_string_dtype(found.dtype)
        if kind is None or kind.length is None or found.ndim != ndim:
            raise damaged(path, place, "it is not text of fixed length")
        _require_bytes(found, found.size * found.dtype.itemsize, path, place)
    return found


def _dataset(parent: h5py.Group, name: str, path: Location) -> h5py.Dataset:
    found = _member(parent, name, path)
    place = _at(parent, name)
    if not isinstance(found, h5py.Dataset):
        raise damaged(path, place, "it is not a dataset")
    with sound(path, place):
        if found.is_virtual or found.external:
            raise damaged(path, place, "its data lies in another file")
    return found


def _member(parent: h5py.Group, name: str, path: Location) -> Any:
    place = _at(parent, name)
    with sound(path, place):
        link = parent.get(name, getlink=True)
        if link is None:
            raise damaged(path, place, "it is missing")
        if not isinstance(link, h5py.HardLink):
            raise damaged(path, place, "it is a link that leads elsewhere")
        return parent[name]


def _require_bytes(found: h5py.Dataset, claimed: int, path: Location, place: str) -> None:
    stored = found.id.get_storage_size()
    if claimed > stored:
        raise damaged(path, place, f"it claims {claimed} bytes and holds {stored}")


def _at(parent: h5py.Group, name: str) -> str:
    return f"{parent.name}/{name}".replace("//", "/")
