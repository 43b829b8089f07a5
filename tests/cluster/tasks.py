"""What tests give to workers; nothing else is imported with it."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from hsprobe.errors import HsprobeError


def command_of(pid: int) -> bytes:
    """The command line of a process."""
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def about_itself(_: int) -> tuple[int, int, list[str]]:
    """(process id, number of threads, its sockets and the heavy libraries it has imported)."""
    time.sleep(0.05)
    threads = list(Path("/proc/self/task").iterdir())
    opened = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]  # noqa: PTH208
    sockets = [name for name in opened if "socket:" in name]
    return os.getpid(), len(threads), [*sockets, *(name for name in ("torch", "ray") if name in sys.modules)]


def number_of(text: str) -> int:
    """The number that a text says."""
    print("what is printed is no answer")
    if text == "nothing":
        raise HsprobeError("There is nothing.", "Give a number.")
    return int(text)


def dies(_: int) -> None:
    """Kill the worker that does this; another process takes its time."""
    if b"hsprobe.cluster.worker" in command_of(os.getpid()):
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(5)
