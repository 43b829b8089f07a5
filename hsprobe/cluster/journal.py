"""What is done of a long comparison, in a file that is only ever added to, so that the next run goes on.

Each line is a CRC-32 in hex, a space and JSON. The first says what is being compared; it is written whole or
not at all. The others hold the results of shards, each under a hash of all that it depends on. What comes
after the first line that does not fit its checksum was being written when a machine stopped, and is dropped.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from hsprobe.errors import HsprobeError

FORMAT = "hsprobe journal 1"
_SYNC_SECONDS = 1.0
_MAX_LINE = 64 << 20


class Journal:
    """An open journal; a context manager.

    Args:
        path: the file; made where there is none.
        about: what is compared, as plain JSON. A journal of something else is started anew.

    Attributes:
        kept: how many entries earlier runs have left.
        anew: why an earlier journal there was not continued, "" if it was or there was none.

    Raises:
        HsprobeError: the file is no journal, is in use, or cannot be written.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.path = path
        self.anew = ""
        self._about = {"format": FORMAT, **json.loads(json.dumps(about))}
        self._places: dict[str, tuple[int, int]] = {}
        self._synced = time.monotonic()
        try:
            self._file = self._opened()
        except OSError as error:
            raise HsprobeError(
                f"The journal {path} cannot be written: {error.strerror or error}.", "Give another --journal."
            ) from error
        self.kept = len(self._places)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def get(self, key: str) -> Any:
        """The entry under a key, None if there is none."""
        found = self._places.get(key)
        if found is None:
            return None
        return json.loads(os.pread(self._file.fileno(), found[1], found[0]))["value"]

    def put(self, key: str, value: Any) -> None:
        """Add an entry: plain JSON, no None."""
        line = _line({"key": key, "value": value})
        try:
            at = os.fstat(self._file.fileno()).st_size
            self._file.write(line)
            self._file.flush()
            if time.monotonic() - self._synced > _SYNC_SECONDS:
                os.fsync(self._file.fileno())
                self._synced = time.monotonic()
        except OSError as error:
            raise HsprobeError(
                f"The journal {self.path} cannot be written: {error.strerror or error}.",
                "Make room, or leave out --journal; what it holds is not lost.",
            ) from error
        self._places[key] = at + 9, len(line) - 10

    def _opened(self) -> IO[bytes]:
        if not self.path.exists() or not self.path.stat().st_size:
            return self._begun()
        file = self.path.open("r+b")
        try:
            self._lock(file)
            if not self._read(file):
                file.close()
                return self._begun()
        except BaseException:
            file.close()
            raise
        return file

    def _begun(self) -> IO[bytes]:
        """A new journal in the place of what is there, with its first line."""
        made = self.path.with_name(f"{self.path.name}.new")
        with made.open("wb") as new:
            new.write(_line(self._about))
            new.flush()
            os.fsync(new.fileno())
        made.replace(self.path)
        file = self.path.open("r+b")
        self._lock(file)
        file.seek(0, os.SEEK_END)
        return file

    def _lock(self, file: IO[bytes]) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise HsprobeError(
                f"The journal {self.path} is in use by another run.",
                "Wait for it, or give another --journal.",
            ) from None

    def _read(self, file: IO[bytes]) -> bool:
        """Note where the entries are, and cut off a damaged end; whether it is of what is compared now."""
        about = _content(file.readline(_MAX_LINE))
        if about is None or about.get("format") != FORMAT:
            raise HsprobeError(
                f"{self.path} is no journal of this hsprobe, and is left as it is.", "Give another --journal."
            )
        changed = [name for name in {**about, **self._about} if about.get(name) != self._about.get(name)]
        if changed:
            self.anew = f"{' and '.join(sorted(changed))} changed since"
            return False
        at = file.tell()
        while line := file.readline(_MAX_LINE):
            entry = _content(line)
            if entry is None:
                break
            self._places[str(entry["key"])] = at + 9, len(line) - 10
            at += len(line)
        file.truncate(at)
        file.seek(at)
        return True


def _line(value: Mapping[str, Any]) -> bytes:
    text = json.dumps(value, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _content(line: bytes) -> dict[str, Any] | None:
    """What a line holds, None if it is damaged."""
    text = line[9:-1]
    if line[-1:] != b"\n" or line[:9] != b"%08x " % zlib.crc32(text):
        return None
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
