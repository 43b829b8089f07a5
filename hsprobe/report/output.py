"""Where a report goes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from hsprobe.errors import HsprobeError


def write(path: Path | None, render: Callable[[TextIO], None]) -> None:
    """Render to a file, or to standard output without one.

    Raises:
        HsprobeError: the file cannot be written.
    """
    if path is None:
        render(sys.stdout)
        return
    try:
        with path.open("w", encoding="utf-8") as stream:
            render(stream)
    except OSError as error:
        reason = error.strerror or str(error)
        raise HsprobeError(
            f"The report cannot be written to {path}: {reason}.", "Give another -o FILE."
        ) from error
