"""How many cores this process may use, which is often fewer than the machine has."""

from __future__ import annotations

import os
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_MINE = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Those that it may run on, and no more than the time that its container is given is good for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *(int(share) for share in _shares(_ROOT, _MINE))]))


def _shares(root: Path, mine: Path) -> list[float]:
    """How many cores' time the control groups around this process may take, of either version."""
    found = []
    for folder in _groups(root, mine):
        limit = _words(folder / "cpu.max") or [
            *_words(folder / "cpu.cfs_quota_us"),
            *_words(folder / "cpu.cfs_period_us"),
        ]
        # "max", and -1 in version 1, are no limit.
        if len(limit) == 2 and all(word.isdecimal() and int(word) for word in limit):
            found.append(int(limit[0]) / int(limit[1]))
    return found


def _groups(root: Path, mine: Path) -> list[Path]:
    """The folders of the groups, inner and outer; what a container is in shows as the root."""
    found = {root, root / "cpu", root / "cpu,cpuacct"}
    try:
        lines = mine.read_text().splitlines()
    except OSError:
        return sorted(found)
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or "cpu" in controllers.split(","):
            inner = root / controllers / path.strip("/")
            found |= {inner, *(outer for outer in inner.parents if outer.is_relative_to(root))}
    return sorted(found)


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []
