"""The spools of a running server: telling its probes to record, and knowing when all is written."""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hsprobe.trace.spool import SpoolReader
from hsprobe.trace.switch import Switch

QUIET_SECONDS = 0.3


class SpoolFolder:
    """A server's spool folder, watched from the moment this object is made.

    What earlier captures recorded there is left out.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._starts = {path: path.stat().st_size for path in self.paths()}
        self._readers: dict[Path, SpoolReader] = {}
        self._last_kind: dict[Path, str] = {}

    def paths(self) -> list[Path]:
        """The spools, one a rank."""
        return sorted(self.folder.glob("*.spool"))

    def starts(self) -> dict[Path, int]:
        """Where in each spool this capture begins, in bytes."""
        return {path: self._starts.get(path, 0) for path in self.paths()}

    @contextmanager
    def armed(self, sampling: Mapping[str, Any] | None = None) -> Iterator[None]:
        """While in this context, the server's probes record, as `sampling` asks (see `session.Plan`)."""
        switch = Switch(self.folder)
        switch.turn_on(json.dumps(dict(sampling)) if sampling else "")
        try:
            yield
        finally:
            switch.turn_off()

    def bytes_written(self) -> int:
        """Bytes recorded so far by all ranks."""
        starts = self.starts()
        return sum(path.stat().st_size - start for path, start in starts.items())

    def wait_until_written(self, seconds: float) -> bool:
        """Wait until every rank says that its queue is empty; ``False`` when one did not in time."""
        deadline = time.monotonic() + seconds
        quiet_since: float | None = None
        while time.monotonic() < deadline:
            if not self._all_idle():
                quiet_since = None
            elif quiet_since is None:
                quiet_since = time.monotonic()
            elif time.monotonic() - quiet_since >= QUIET_SECONDS:
                return True
            time.sleep(0.05)
        return False

    def _all_idle(self) -> bool:
        paths = self.paths()
        for path in paths:
            reader = self._readers.setdefault(path, SpoolReader(path, self._starts.get(path, 0)))
            for record in reader:
                self._last_kind[path] = record.kind
        return bool(paths) and all(self._last_kind.get(path, "idle") in ("idle", "bye") for path in paths)
