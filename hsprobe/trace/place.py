"""Where a server leaves its spools, and the file that tells it to record. Standard library only."""

import os
import tempfile
from pathlib import Path

ARMED = "armed"
"""Name of the file in a spool folder whose presence makes a server's probes record."""


def directory_for_port(port: int) -> Path:
    """The private folder in which the probes of a server on this port leave their spools."""
    return Path(tempfile.gettempdir()) / f"hsprobe-{os.getuid()}" / f"port-{port}"


def make_private(directory: Path) -> None:
    """Create a folder that only its owner can enter.

    Raises:
        PermissionError: somebody else owns it, or others can write to it.
    """
    for folder in (directory.parent, directory):
        folder.mkdir(mode=0o700, exist_ok=True, parents=True)
    status = directory.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{directory} is not private to this user")
