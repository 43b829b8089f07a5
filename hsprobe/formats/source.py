"""The file or folder that a dump is: its files and what is in them. Links out of it are not followed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, repeat
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


@dataclass(frozen=True)
class _Folder:
    """What is in a folder, in natural order.

    A dump may have millions of files: what is done for each of them here is done by Python's own loops.

    Attributes:
        before: what the names of its files begin with.
        files: as one text with slashes between them, which takes a tenth of a list's memory.
        endings: how the files end, from their last dot on.
    """

    before: str
    files: str
    endings: set[str]
    folders: list[str]

    @classmethod
    def of(cls, before: str, files: list[str], folders: list[str]) -> _Folder:
        ending = _ending(files[0]) if files else ""
        alike = ending[:1] == "." and all(map(str.endswith, files, repeat(ending)))
        endings = {ending} if alike else {_ending(name) for name in files}
        return cls(before, "/".join(in_natural_order(files)), endings, in_natural_order(folders))

    def names(self, suffixes: tuple[str, ...]) -> Iterator[str]:
        """Of the files that end so, all without suffixes."""
        names = map(self.before.__add__, self.files.split("/") if self.files else ())
        if not suffixes or all(ending.endswith(suffixes) for ending in self.endings):
            return names
        return (name for name in names if name.endswith(suffixes))


def _ending(name: str) -> str:
    return name[name.rfind(".") :]


@dataclass
class Source:
    """What was given as a dump.

    Attributes:
        path: the file or folder, which may be behind a URL.
        unread: files left out, and why.
    """

    path: Location
    unread: list[tuple[str, str]] = field(default_factory=list)
    _listed: dict[str, _Folder] = field(default_factory=dict, repr=False)
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
            return iter([self.path.name])
        if self._remote is not None:
            found = self._remote.walk(under.strip("/"), _MAX_FOLDERS_DEEP)
            return (name for name in found if not suffixes or name.endswith(suffixes))
        return chain.from_iterable(one.names(suffixes) for one in self._folders(under.strip("/"), 0))

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
        """Whether any file may end so, by the endings of all, looked at once."""
        return not suffixes or any(s.endswith(e) or e.endswith(s) for s in suffixes for e in self._endings)

    @cached_property
    def _endings(self) -> set[str]:
        if self._remote is not None:
            return {_ending(name) for name in self._remote.walk("", _MAX_FOLDERS_DEEP)}
        return {ending for one in self._folders("", 0) for ending in one.endings}

    def has(self, name: str) -> bool:
        """Whether there is such a file beside the samples, or in the folder that holds the file given."""
        return _stays_inside(name) and (self.root / name).is_file()

    def _folders(self, folder: str, deep: int) -> Iterator[_Folder]:
        """A folder and those in it, each listed once."""
        if folder not in self._listed:
            self._listed[folder] = self._list(folder)
        found = self._listed[folder]
        yield found
        for name in found.folders:
            if deep < _MAX_FOLDERS_DEEP:
                yield from self._folders(found.before + name, deep + 1)

    def _list(self, folder: str) -> _Folder:
        before, folders = f"{folder}/" if folder else "", []
        try:
            with os.scandir(str(self.root / folder)) as found:
                entries = [entry for entry in found if entry.name[0] != "."]
            files = [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
            for entry in entries if len(files) < len(entries) else ():
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.name)
                elif entry.is_symlink():
                    if not self._inside(before + entry.name):
                        self.unread.append((before + entry.name, "it is a link that leads out of the folder"))
                    elif entry.is_file():
                        files.append(entry.name)
        except OSError as error:
            self.unread.append((folder or str(self.path), error.strerror or str(error)))
            return _Folder.of(before, [], [])
        return _Folder.of(before, files, folders)

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
