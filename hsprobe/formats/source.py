"""The file or folder that a dump is: its files and what is in them. Links out of it are not followed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from hsprobe.errors import HsprobeError
from hsprobe.formats.containers import arrays, packed, tensors, torchfile, zipped
from hsprobe.formats.naturally import in_natural_order
from hsprobe.formats.remote import RemoteFolder
from hsprobe.formats.stored import Bytes, FileBytes, damaged
from hsprobe.remote.location import Location, Remote

_MAX_FOLDERS_DEEP = 8
_MAX_JSON = 256 << 20
_PEEKED = 32
_KEPT = 16
HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"


@dataclass
class Source:
    """What was given as a dump.

    Attributes:
        path: the file or folder, which may be behind a URL.
        unread: files left out, and why.
    """

    path: Location
    unread: list[tuple[str, str]] = field(default_factory=list)
    _endings: set[str] | None = field(default=None, repr=False)
    _listed: dict[str, tuple[str, list[str]]] = field(default_factory=dict, repr=False)
    _loaded: dict[str, tuple[Any, HsprobeError | None]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not self.path.exists():
            raise HsprobeError(f"There is no file or folder {self.path}.", "Check the path.")

    @cached_property
    def is_folder(self) -> bool:
        return self.path.is_dir()

    @cached_property
    def root(self) -> Location:
        """The folder that no file of the dump may lie outside of."""
        root = self.path if self.is_folder else self.path.parent
        return root if isinstance(root, Remote) else root.resolve()

    @cached_property
    def _remote(self) -> RemoteFolder | None:
        return RemoteFolder(self.root, self.unread) if isinstance(self.root, Remote) else None

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
        """Whether any file may end so, by the endings seen in one walk through all, done once."""
        if self._endings is None:
            self._endings = {name[name.rfind(".") :] for name in self._walk("", 0)}
        endings = self._endings
        return not suffixes or any(s.endswith(e) or e.endswith(s) for s in suffixes for e in endings)

    def has(self, name: str) -> bool:
        """Whether there is such a file beside the samples, or in the folder that holds the file given."""
        return _stays_inside(name) and (self.root / name).is_file()

    def _walk(self, folder: str, deep: int) -> Iterator[str]:
        if self._remote is not None:
            yield from self._remote.walk(folder, _MAX_FOLDERS_DEEP - deep)
            return
        if folder not in self._listed:
            self._listed[folder] = self._list(folder)
        files, folders = self._listed[folder]
        before = f"{folder}/" if folder else ""
        for name in files.split("/") if files else ():
            yield before + name
        for name in folders:
            if deep < _MAX_FOLDERS_DEEP:
                yield from self._walk(before + name, deep + 1)

    def _list(self, folder: str) -> tuple[str, list[str]]:
        """Files of a folder, as one text with slashes between them, which takes a tenth of a list's memory;
        and the folders in it."""
        files, folders = [], []
        try:
            with os.scandir(str(self.root / folder)) as found:
                for entry in found:
                    if entry.name.startswith("."):
                        continue
                    if entry.is_file(follow_symlinks=False):
                        files.append(entry.name)
                    elif entry.is_dir(follow_symlinks=False):
                        folders.append(entry.name)
                    elif entry.is_symlink():
                        name = f"{folder}/{entry.name}" if folder else entry.name
                        if not self._inside(name):
                            self.unread.append((name, "it is a link that leads out of the folder"))
                        elif entry.is_file():
                            files.append(entry.name)
        except OSError as error:
            self.unread.append((folder or str(self.path), error.strerror or str(error)))
            return "", []
        return "/".join(in_natural_order(files)), in_natural_order(folders)

    def _inside(self, name: str) -> bool:
        root = Path(str(self.root))
        try:
            return (root / name).resolve(strict=True).is_relative_to(root)
        except (OSError, RuntimeError):
            return False

    def bytes_of(self, name: str) -> Bytes:
        """The bytes of one file.

        Raises:
            HsprobeError: it cannot be read, or lies outside.
        """
        if self._remote is not None:
            if not _stays_inside(name):
                raise damaged(name, "it leads out of the folder")
            return self._remote.bytes_of(name)
        path = Path(str(self.root)) / name
        odd = path.is_symlink() or not _stays_inside(name)
        if self.is_folder and odd and not self._inside(name):
            raise damaged(name, "it leads out of the folder")
        return FileBytes(path, name)

    def check(self) -> None:
        """Raise what went wrong with a remote place so far: readers take it for a damaged sample."""
        if isinstance(self.path, Remote):
            self.path.check()

    def state_of(self, name: str) -> tuple[int, str]:
        """(bytes, what else changes when it does) of one file, without opening it where that can be had."""
        if self._remote is not None:
            return self._remote.state_of(name)
        found = (Path(str(self.root)) / name).stat()
        return found.st_size, str(found.st_mtime_ns)

    def place_of(self, name: str) -> Location:
        """Where one file lies, for what opens it by itself.

        Raises:
            HsprobeError: it cannot be read, or lies outside.
        """
        self.bytes_of(name)
        return self.root / name

    def load(self, name: str) -> Any:
        """What one file holds, by its content: see `contents`.

        Raises:
            HsprobeError: it is damaged, or of no kind known here.
        """
        found = self._loaded.get(name)
        if found is None:
            try:
                found = contents(self.bytes_of(name), self.root / name), None
            except HsprobeError as error:
                self.check()
                found = None, error
            # Every reader looks at the first files to tell whether they are its own.
            self._loaded[name] = found
            if len(self._loaded) > _KEPT:
                del self._loaded[next(iter(self._loaded))]
        content, trouble = found
        if trouble is not None:
            raise trouble
        return content


def contents(source: Bytes, path: Location | None = None) -> Any:
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
    if first[:2] == b"\x80\x02" and path is not None:
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


def _stays_inside(name: str) -> bool:
    return ".." not in Path(name).parts and not Path(name).is_absolute()
