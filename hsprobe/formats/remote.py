"""The folder of a dump behind a URL: listed folder by folder, its files read in ranges."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from hsprobe.formats.naturally import natural
from hsprobe.formats.stored import damaged
from hsprobe.remote.location import Entry, Remote
from hsprobe.remote.stream import RemoteFile, fetch_ends

_MOST_AHEAD = 64
"""Files whose ends are fetched at once where one file after the other is read."""
_KEPT_FOLDERS = 64


class _Folder:
    """What is in a folder, in natural order."""

    def __init__(self, entries: list[Entry]) -> None:
        self.files = [one for one in entries if not one.is_folder]
        self.folders = [one.name for one in entries if one.is_folder]
        self.order = {one.name: at for at, one in enumerate(self.files)}


class RemoteBytes:
    """See `Bytes`; of a file behind a URL."""

    def __init__(self, file: RemoteFile, name: str) -> None:
        self.name, self.size, self._file = name, file.size, file

    def read(self, offset: int, count: int) -> bytearray:
        """See `Bytes`."""
        if offset < 0 or count < 0 or offset + count > self.size:
            raise damaged(self.name, "it is cut short")
        return self._file.read(offset, count)


class RemoteFolder:
    """Files under a URL.

    Args:
        unread: takes what cannot be listed, and why.
    """

    def __init__(self, root: Remote, unread: list[tuple[str, str]]) -> None:
        self._root, self._unread = root, unread
        self._listed: OrderedDict[str, _Folder] = OrderedDict()
        self._last: tuple[str, int] = ("", -1)
        self._ahead = 1
        root.refresh()

    def walk(self, folder: str, deep: int) -> Iterator[str]:
        """Names of the files in a folder and in those in it, as `Source.files` gives them."""
        try:
            known = self._members(folder)
        except FileNotFoundError:
            self._unread.append((folder or str(self._root), "there is no such folder"))
            return
        for one in known.files:
            yield f"{folder}/{one.name}" if folder else one.name
        for name in known.folders if deep > 0 else ():
            yield from self.walk(f"{folder}/{name}" if folder else name, deep - 1)

    def bytes_of(self, name: str) -> RemoteBytes:
        """The bytes of one file; where files are asked for in order, the next ones are fetched with it."""
        folder, _, last = name.rpartition("/")
        known = self._listed.get(folder)
        if known is None or last not in known.order:
            return RemoteBytes(RemoteFile(self._root / name), name)
        file = RemoteFile(self._root / name, known.files[known.order[last]])
        if file.size and not file.has(0):
            self._fetch_more(folder, last, known)
        return RemoteBytes(file, name)

    def state_of(self, name: str) -> tuple[int, str]:
        """(bytes, mark) of one file."""
        folder, _, last = name.rpartition("/")
        known = self._listed.get(folder)
        if known is not None and last in known.order:
            found: Entry | None = known.files[known.order[last]]
        else:
            found = (self._root / name).entry()
        return (0, "") if found is None else (found.size, found.mark)

    def _fetch_more(self, folder: str, name: str, known: _Folder) -> None:
        """The ends of this file and of as many of the next as reading in order has shown to be worth it."""
        at = known.order[name]
        self._ahead = min(2 * self._ahead, _MOST_AHEAD) if self._last == (folder, at) else 1
        stop = at + self._ahead
        self._last = (folder, stop)
        base = self._root / folder if folder else self._root
        fetch_ends([RemoteFile(base / one.name, one) for one in known.files[at:stop]])

    def _members(self, folder: str) -> _Folder:
        found = self._listed.get(folder)
        if found is None:
            entries = sorted(self._root.members(folder), key=lambda one: natural(one.name))
            found = _Folder([one for one in entries if not one.name.startswith(".")])
            self._listed[folder] = found
            if len(self._listed) > _KEPT_FOLDERS:
                self._listed.popitem(last=False)
        return found
