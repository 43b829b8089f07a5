"""Where a server leaves its spools. Standard library only."""

import os
import stat
import tempfile
from pathlib import Path


def directory_for_port(port: int) -> Path:
    """The private folder in which the probes of a server on this port leave their spools."""
    return Path(tempfile.gettempdir()) / f"hsprobe-{os.getuid()}" / f"port-{port}"


def make_private(directory: Path) -> None:
    """Create a folder that only its owner can enter.

    Raises:
        PermissionError: somebody else owns it, or others can write to it.
    """
    directory.mkdir(mode=0o700, exist_ok=True)
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{directory} is not a folder private to this user")


def remove_leftovers(directory: Path) -> None:
    """Delete the spools of processes that have ended."""
    for spool in directory.glob("*.spool"):
        if not owner_runs(spool):
            spool.unlink(missing_ok=True)


def owner_runs(spool: Path) -> bool:
    """Whether the process that writes a spool runs, as far as its name tells: it ends in the process id."""
    owner = spool.stem.rpartition("-")[2]
    return not owner.isdigit() or _runs(int(owner))


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
