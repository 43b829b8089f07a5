"""Files and folders behind a URL (`s3://`, `gs://`, `hf://`...), read by fsspec in ranges of bytes.

Local paths never come here beyond `place`. A URL is taken from a person alone, never out of a file: what a
dump names is looked for under the folder that was given.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from hsprobe.errors import HsprobeError
from hsprobe.remote.trouble import RemoteError, explained, missing_package, uncollected

_TRIES, _PAUSE_SECONDS = 3, 0.5
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_CHAIN = re.compile(r"[A-Za-z0-9+]+::.*://")
_SECRETS = ("http", "https")
_GIVEN: dict[str, str] = {}
"""What is shown of a URL -> the URL; that of a signed link holds a secret."""


@dataclass(frozen=True)
class Entry:
    """A member of a remote folder; `size` and `mark` (what changes when it does) are of files."""

    name: str
    is_folder: bool
    size: int = 0
    mark: str = ""


class Remote:
    """A file or folder behind a URL, with as much of `pathlib.Path` as readers need.

    Raises:
        HsprobeError: on use: fsspec or the protocol's package is missing, or the place cannot be reached.
    """

    def __init__(self, url: str, troubles: list[RemoteError] | None = None) -> None:
        if "::" in url:
            raise HsprobeError(
                f"{url.partition('::')[0]}:: is a chain of URLs, of which none is followed.",
                "Give the URL of the dump or trace itself.",
            )
        self.url = url
        self.protocol = url.partition("://")[0].lower()
        self._shown = _without_secrets(url) if self.protocol in _SECRETS else url
        _GIVEN[self._shown] = url
        self._troubles: list[RemoteError] = [] if troubles is None else troubles

    def __reduce__(self) -> tuple[type[Remote], tuple[str]]:
        return Remote, (self.url,)

    def __str__(self) -> str:
        return self._shown

    def __repr__(self) -> str:
        return f"Remote({self._shown!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and other.url == self.url

    def __hash__(self) -> int:
        return hash(self.url)

    def __truediv__(self, name: str) -> Remote:
        if self.protocol not in _SECRETS:
            return Remote(f"{self.url.rstrip('/')}/{name}", self._troubles)
        parts = urlsplit(self.url)
        path = f"{parts.path.rstrip('/')}/{quote(name)}"
        return Remote(urlunsplit(parts._replace(path=path)), self._troubles)

    @property
    def name(self) -> str:
        return PurePosixPath(self._plain_path()).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self._plain_path()).suffix

    @property
    def parent(self) -> Remote:
        if self.protocol not in _SECRETS:
            return Remote(self.url.rstrip("/").rpartition("/")[0], self._troubles)
        parts = urlsplit(self.url)
        path = parts.path.rstrip("/").rpartition("/")[0]
        return Remote(urlunsplit(parts._replace(path=path)), self._troubles)

    def _plain_path(self) -> str:
        if self.protocol in _SECRETS:
            return unquote(urlsplit(self.url).path)
        return self.url.partition("://")[2].rstrip("/")

    def entry(self) -> Entry | None:
        """What lies there, None for nothing."""
        files, path = self.system()
        if self.protocol in _SECRETS and self.url.partition("?")[0].endswith("/"):
            raise HsprobeError(
                f"{self} is a folder on a web server, whose files cannot be listed.",
                "Give the URL of one file, or copy the folder to where files can be listed (s3://, gs://, hf://).",
            )
        try:
            found = self._tried(lambda: files.info(path), "looked for")
        except FileNotFoundError:
            return None
        return _entry(self.name, found)

    def exists(self) -> bool:
        """See `pathlib.Path`."""
        return self.entry() is not None

    def is_file(self) -> bool:
        """See `pathlib.Path`."""
        found = self.entry()
        return found is not None and not found.is_folder

    def is_dir(self) -> bool:
        """See `pathlib.Path`."""
        found = self.entry()
        return found is not None and found.is_folder

    def check(self) -> None:
        """Raise what went wrong with the connection, here or in the folder around it."""
        if self._troubles:
            raise self._troubles[0]

    def refresh(self) -> None:
        """Forget what fsspec remembers of the folders there."""
        self.system()[0].invalidate_cache()

    def members(self, folder: str = "") -> list[Entry]:
        """What a folder holds, in no order. Names that could lead out of it are left out."""
        files, path = self.system()
        path = f"{path.rstrip('/')}/{folder}" if folder else path.rstrip("/")
        found = self._tried(lambda: files.ls(path, detail=True), "listed")
        base = f"{path.strip('/')}/"
        entries = []
        for one in found:
            name = str(one["name"]).strip("/").removeprefix(base)
            if (
                name
                and "/" not in name
                and "\\" not in name
                and name not in (".", "..")
                and name.isprintable()
            ):
                entries.append(_entry(name, one))
        return entries

    def open(self, mode: str = "rb", *, known: Entry | None = None) -> Any:
        """A `RemoteStream` of a file.

        Args:
            known: what a listing said of it, which spares asking.

        Raises:
            HsprobeError: there is no such file, or no part of it can be had alone.
        """
        from hsprobe.remote.stream import RemoteFile, RemoteStream

        if mode != "rb":
            raise HsprobeError(f"{self} cannot be written.", "Give a local path to write to.")
        return RemoteStream(RemoteFile(self, known))

    def read_text(self, encoding: str = "utf-8") -> str:
        """See `pathlib.Path`."""
        with self.open() as stream:
            return bytes(stream.read()).decode(encoding)

    def fetch(self, start: int, stop: int) -> bytes:
        """Bytes start..stop of the file."""
        files, path = self.system()
        data = self._tried(lambda: files.cat_file(path, start=start, end=stop), "read")
        if len(data) != stop - start:
            raise RemoteError(
                f"{self} changed while it was read, or its server gives other bytes than those asked for.",
                "Run the command again.",
            )
        return bytes(data)

    def system(self) -> tuple[Any, str]:
        """(fsspec's file system, the path in it)."""
        try:
            import fsspec
        except ImportError:
            raise missing_package(str(self), "fsspec") from None
        with explained(str(self), "opened"):
            try:
                kind = fsspec.get_filesystem_class(self.protocol)
            except ImportError as error:
                raise missing_package(str(self), str(error)) from error
            except ValueError:
                raise HsprobeError(
                    f"{self}: no protocol {self.protocol}:// is known.", "Check the URL."
                ) from None
            files = kind(**kind._get_kwargs_from_urls(self.url))
            return files, str(kind._strip_protocol(self.url))

    def _tried(self, work: Callable[[], Any], done: str) -> Any:
        """The result of `work`, tried again where a connection was lost."""
        for left in reversed(range(_TRIES)):
            try:
                with uncollected(), explained(str(self), done):
                    return work()
            except RemoteError as error:
                if not left or error.final:
                    self._troubles.append(error)
                    raise
                time.sleep(_PAUSE_SECONDS)
        raise AssertionError


Location: TypeAlias = Path | Remote
"""Where a dump or a trace lies."""


def locate(given: str | os.PathLike[str] | Remote) -> Location:
    """What a person gave as a dump or a trace: a local path, or a URL that fsspec is asked for.

    Raises:
        HsprobeError: it is a chain of URLs.
    """
    if isinstance(given, Remote):
        return given
    if not isinstance(given, str):
        return Path(given)
    found = _URL.match(given)
    if found is None and not _CHAIN.match(given):
        return Path(given)
    if found is not None and found[1].lower() in ("file", "local"):
        return Path(given[found.end() :])
    return Remote(_GIVEN.get(given, given))


def is_url(text: str) -> bool:
    """Whether a text names something that is not local."""
    return isinstance(locate(text), Remote)


def address(where: Location) -> str:
    """What `locate` finds again, in another process and folder too. That of a signed link holds a secret."""
    return where.url if isinstance(where, Remote) else str(where.absolute())


def identity(where: Location) -> str:
    """A name for a place that does not depend on the working directory, without secrets."""
    return str(where) if isinstance(where, Remote) else str(where.resolve())


def _without_secrets(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment=""))


def _entry(name: str, found: dict[str, Any]) -> Entry:
    marks = [found.get(key) for key in ("ETag", "etag", "md5Hash", "generation", "oid", "blob_id", "sha256")]
    marks += [found.get(key) for key in ("LastModified", "Last-Modified", "updated", "mtime", "created")]
    mark = " ".join(str(one) for one in marks if one)
    return Entry(name, found.get("type") == "directory", int(found.get("size") or 0), mark)
