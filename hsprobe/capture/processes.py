"""Looks after the processes that record, so that one that died or was stopped is named at once.

A server with a rank that hangs waits for it, in the middle of a sum, and looks only slow from outside.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

from hsprobe.errors import HsprobeError
from hsprobe.trace.place import owner_runs

STOPPED_SECONDS = 5.0
"""How long a process may be stopped (by a debugger for instance) before that is trouble."""
UNNOTICED_SECONDS = 10.0
"""In this time a server has noticed that its processes ended, if it does at all (0.5.9 does not)."""
_ENDED = ("", "Z", "X")


class RankTrouble(HsprobeError):
    """A process that records has ended, or does not go on, while others live."""


class RankProcesses:
    """The processes of the spools in a folder.

    Args:
        folder: a server's spool folder; spools of processes that have ended already are left out.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._past = {spool for spool in folder.glob("*.spool") if not owner_runs(spool)}
        self._stopped_since: dict[Path, float] = {}
        self._all_gone_since: float | None = None

    def check(self) -> None:
        """Raises RankTrouble naming the processes that have ended, or are stopped.

        When all have ended, that is the server's end, which others tell better, unless it does not notice.
        """
        now = time.monotonic()
        states = {spool: _state(spool) for spool in sorted(self._folder.glob("*.spool"))}
        states = {spool: state for spool, state in states.items() if spool not in self._past}
        gone = [spool for spool, state in states.items() if state in _ENDED]
        all_gone = bool(gone) and len(gone) == len(states)
        self._all_gone_since = (self._all_gone_since or now) if all_gone else None
        noticed = all_gone and now - (self._all_gone_since or now) < UNNOTICED_SECONDS
        if gone and not noticed:
            raise RankTrouble(
                f"{_named(gone, len(states))} ended in the middle of the capture.",
                "The trace holds what it had recorded; the server's log says why it ended.",
            )
        self._stopped_since = {
            spool: self._stopped_since.get(spool, now)
            for spool, state in states.items()
            if state in ("T", "t")
        }
        stopped = [spool for spool, since in self._stopped_since.items() if now - since > STOPPED_SECONDS]
        if stopped:
            pids = " ".join(_pid(spool) for spool in stopped)
            have = "has" if len(stopped) == 1 else "have"
            raise RankTrouble(
                f"{_named(stopped, len(states))} {have} been stopped for {STOPPED_SECONDS:.0f} s, "
                "and the server waits for it.",
                f"Let it go on (kill -CONT {pids}) and capture again.",
            )


def ended(spool: Path) -> bool:
    """Whether the process of a spool is no more, though its parent may not have noticed yet."""
    return _state(spool) in _ENDED


def _state(spool: Path) -> str:
    """State of a spool's process in Linux's letters (R, S, T, Z...); "" if there is none, "?" if unknown."""
    if not owner_runs(spool):
        return ""
    try:
        status = Path("/proc", _pid(spool), "stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return "?"
    # The name of the program, in parentheses, may itself hold parentheses and blanks.
    return status.rpartition(")")[2].split()[0]


def _pid(spool: Path) -> str:
    return spool.stem.rpartition("-")[2]


def _named(spools: list[Path], n_processes: int) -> str:
    """``The server's process 123 (tp 1)``, or several of them."""
    names = []
    for spool in spools:
        place = dict(re.findall(r"(tp|pp|dp)(\d+)", spool.stem))
        axes = ", ".join(f"{axis} {place[axis]}" for axis in ("tp", "pp", "dp") if int(place.get(axis, 0)))
        names.append(f"{_pid(spool)} ({axes or 'tp 0'})" if n_processes > 1 else _pid(spool))
    if len(names) == 1:
        return f"The server's process {names[0]}"
    return f"The server's processes {', '.join(names[:-1])} and {names[-1]}"
