"""What holds for every test of the probes."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def no_writer_outlives_its_test() -> Iterator[None]:
    """A writer ends with the process that it writes for, which here is that of all tests."""
    yield
    mine = ["hsprobe.probes.sglang.writer", "write", str(os.getpid())]
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_text().split("\0")
            if all(word in words for word in mine):
                os.kill(int(process.name), signal.SIGKILL)
