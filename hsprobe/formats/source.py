"""The file or folder that a dump is: its files and what is in them. Links out of it are not followed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from hsprobe.errors import HsprobeError
from hsprobe.formats.containers import arrays, packed, tensors, torchfile, zipped
from hsprobe.formats.stored import Bytes, FileBytes, damaged

_MAX_FOLDERS_DEEP = 8
_MAX_JSON = 256 << 20
_PEEKED = 32
_KEPT = 16
_NUMBERS = re.compile(r"(\d+)")
HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"


@dataclass
class Source:
    """What was given as a dump.

    Attributes:
        path: the file or folder.
        unread: files left out, and why.
    """

    path: Path
    unread: list[tuple[str, str]] = field(default_factory=list)
    _endings: set[str] | None = field(default=None, repr=False)
    _loaded: dict[str, tuple[Any, HsprobeError | None]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not self.path.exists():
            raise HsprobeError(f"There is no file or folder {self.path}.", "Check the path.")

    @property
    def is_folder(self) -> bool:
        return self.path.is_dir()

    @cached_property
    def root(self) -> Path:
        """The folder that no file of the dump may lie outside of."""
        return (self.path if self.is_folder else self.path.parent).resolve()

    def files(self, *suffixes: str, under: str = "") -> Iterator[str]:
        """Names of the files that end so (all without suffixes), relative to the folder, in natural order.

        Numbers in names count as numbers: data_2 comes before data_10. Hidden files are left out.
        """
        if not self.is_folder:
            yield self.path.name
            return
        for name in self._walk(under.strip("/"), 0):
            if not suffixes or name.endswith(suffixes):
                yield name

    def peek(self, *suffixes: str, count: int = _PEEKED) -> list[str]:
        """The first files that end so."""
        found: list[str] = []
        if self.is_folder and not self._may_have(suffixes):
            return found
        for name in self.files(*suffixes):
            found.append(name)
            if len(found) == count:
                return found
        return found

    def _may_have(self, suffixes: tuple[str, ...]) -> bool:
        """Whether any file may end so, by the endings seen in one walk through all, done once.

        Each reader looks for endings of its own, and a walk through 100,000 files takes its time.
        """
        if self._endings is None:
            self._endings = {name[name.rfind(".") :] for name in self._walk("", 0)}
            self.unread.clear()
        endings = self._endings
        return not suffixes or any(s.endswith(e) or e.endswith(s) for s in suffixes for e in endings)

    def has(self, name: str) -> bool:
        """Whether there is such a file beside the samples, or in the folder that holds the file given."""
        return (self.root / name).is_file()

    def _walk(self, folder: str, deep: int) -> Iterator[str]:
        try:
            with os.scandir(self.root / folder) as found:
                members = sorted(found, key=lambda entry: natural(entry.name))
        except OSError as error:
            self.unread.append((folder or str(self.path), error.strerror or str(error)))
            return
        folders = []
        for entry in members:
            name = f"{folder}/{entry.name}" if folder else entry.name
            if entry.name.startswith("."):
                continue
            if entry.is_symlink() and not self._inside(name):
                self.unread.append((name, "it is a link that leads out of the folder"))
            elif entry.is_file():
                yield name
            elif entry.is_dir(follow_symlinks=False):
                folders.append(name)
        for name in folders:
            if deep < _MAX_FOLDERS_DEEP:
                yield from self._walk(name, deep + 1)

    def _inside(self, name: str) -> bool:
        try:
            return (self.root / name).resolve(strict=True).is_relative_to(self.root)
        except (OSError, RuntimeError):
            return False

    def bytes_of(self, name: str) -> FileBytes:
        """The bytes of one file.

        Raises:
            HsprobeError: it cannot be read, or lies outside.
        """
        path = self.root / name
        odd = path.is_symlink() or ".." in Path(name).parts or Path(name).is_absolute()
        if self.is_folder and odd and not self._inside(name):
            raise damaged(name, "it leads out of the folder")
        return FileBytes(path, name)

    def load(self, name: str) -> Any:
        """What one file holds, by its content: see `contents`.

        Raises:
            HsprobeError: it is damaged, or of no kind known here.
        """
        found = self._loaded.get(name)
        if found is None:
            try:
                found = contents(self.bytes_of(name), str(self.root / name)), None
            except HsprobeError as error:
                found = None, error
            # Every reader looks at the first files to tell whether they are its own.
            self._loaded[name] = found
            if len(self._loaded) > _KEPT:
                del self._loaded[next(iter(self._loaded))]
        content, trouble = found
        if trouble is not None:
            raise trouble
        return content


def contents(source: Bytes, path: str = "") -> Any:
    """What a file holds: mappings, lists, numbers and strings, with `Stored` where tensors are.

    torch, gzip around it, safetensors, npz and npy, JSON and JSONL (a list of its lines).

    Args:
        path: where the file lies, for torch files of the old kind.

    Raises:
        HsprobeError: it is damaged, or none of these.
    """
    first = bytes(source.read(0, min(source.size, 16)))
    if first.startswith(packed.MAGIC):
        source = packed.UnpackedBytes(source)
        first = bytes(source.read(0, min(source.size, 16)))
    if first.startswith(zipped.MAGIC):
        members = zipped.entries(source)
        if any(name.endswith(".npy") for name in members):
            return arrays.read_zip(source, members)
        return torchfile.read(source, members)
    if first.startswith(arrays.MAGIC):
        return arrays.read_one(source)
    if tensors.looks_like(first, source.size):
        return tensors.read(source)
    if first[:2] == b"\x80\x02" and path:
        return torchfile.read_old(source, path)
    if first.lstrip()[:1] in (b"{", b"["):
        return _text(source)
    raise damaged(source.name, "it is empty" if not source.size else "it is of no kind that is known here")


def _text(source: Bytes) -> Any:
    if source.size > _MAX_JSON:
        raise damaged(source.name, f"its text takes {source.size:,} bytes")
    data = bytes(source.read(0, source.size))
    try:
        return tensors.parse_json(data, source.name)
    except HsprobeError:
        lines = [line for line in data.splitlines() if line.strip()]
        if len(lines) < 2:
            raise
        return [tensors.parse_json(line, source.name) for line in lines]


def natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts the numbers in names as numbers."""
    return [
        (int(part), "") if part.isdecimal() and len(part) < 20 else (-1, part)
        for part in re.split(r"(\d+)", name)
    ]
