"""A server that a user starts, with what a test adds to it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from serving import CAPTURE_SECONDS, Configuration, Kitchen

from hsprobe.capture.client import answers_ok
from hsprobe.capture.server import free_port
from hsprobe.fixtures import cpu
from hsprobe.probes import startup


def plugin(folder: Path, name: str, source: str) -> str:
    """A folder for PYTHONPATH from which SGLang loads `source`, which defines `install`, as a plugin.

    Where it has no plugins, hsprobe's own start does.
    """
    info = folder / f"{name}-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    points = [f"[{group}]\n{name} = {name}:install\n" for group in ("sglang.srt.plugins", startup.GROUP)]
    (info / "entry_points.txt").write_text("\n".join(points))
    (folder / f"{name}.py").write_text(source)
    return str(folder)


@contextmanager
def started(
    kitchen: Kitchen, configuration: Configuration, log: Path, plugins: str, **environment: str
) -> Iterator[int]:
    """The port of a healthy server with HSPROBE_CAPTURE=1, killed at the end."""
    port = free_port()
    arguments = [*kitchen.server_arguments(configuration), f"--port={port}"]
    found = cpu.environment(ranks=configuration.ranks)
    path = f"{plugins}{os.pathsep}{found['PYTHONPATH']}"
    with log.open("wb") as file:
        server = subprocess.Popen(
            [sys.executable, "-m", "sglang.launch_server", *arguments],
            env={**found, "PYTHONPATH": path, "HSPROBE_CAPTURE": "1", **environment},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + CAPTURE_SECONDS
        while not answers_ok(f"http://127.0.0.1:{port}/health"):
            assert server.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.5)
        yield port
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
