"""A server under observation: one that hsprobe starts and stops, or one that is already there."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hsprobe.capture.client import answers_ok
from hsprobe.errors import HsprobeError
from hsprobe.probes import startup
from hsprobe.trace.place import directory_for_port
from hsprobe.trace.spool import wait_until_closed

LOG_LINES_SHOWN = 15
STOP_SECONDS = 15.0
_PORTS = (20_000, 32_000)


class AttachedServer:
    """A server that somebody else started, with ``HSPROBE_CAPTURE=1``, on this machine.

    Args:
        url: its address, e.g. ``http://127.0.0.1:30000``.
        spools: its spool folder; ``None`` means the one that belongs to its port.

    Raises:
        HsprobeError: nothing answers there, or it runs without probes.
    """

    def __init__(self, url: str, spools: Path | None) -> None:
        address = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        if address.scheme not in ("http", "https") or not address.hostname:
            raise HsprobeError(f"{url} is not an address.", "Write it as http://127.0.0.1:30000.")
        self.url = f"{address.scheme}://{address.netloc}"
        if not answers_ok(f"{self.url}/health"):
            raise HsprobeError(
                f"No healthy server answers at {self.url}.", "Start it first, or check the port."
            )
        self.spools = spools or directory_for_port(address.port or 80)
        if not any(self.spools.glob("*.spool")):
            raise HsprobeError(
                f"The server at {self.url} left no spool in {self.spools}.",
                "Start it on this machine, as this user, with HSPROBE_CAPTURE=1 in its environment "
                "(a release before 0.5.11: through hsprobe run).",
            )

    def check(self) -> None:
        """Raises HsprobeError when the server has gone; an attached one is only asked."""
        if not answers_ok(f"{self.url}/health"):
            raise HsprobeError(f"The server at {self.url} stopped answering.", "Its log says why.")

    def stop(self) -> None:
        """Leave it running: it is not ours."""


class LaunchedServer:
    """A ``sglang.launch_server`` in a process group of its own, with probes armed.

    Args:
        arguments: as for ``python -m sglang.launch_server``.
        spools: the folder for its spools.
        log: the file that gets what it prints.
        environment: variables to add to this process's own.
    """

    def __init__(
        self, arguments: Sequence[str], spools: Path, log: Path, environment: Mapping[str, str]
    ) -> None:
        self.spools = spools
        self.log = log
        host = _value_of(arguments, "--host") or "127.0.0.1"
        port = _value_of(arguments, "--port")
        given = list(arguments)
        if port is None:
            port = str(free_port())
            given += ["--port", port]
        self.url = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
        found = {**os.environ, **environment, "HSPROBE_CAPTURE": str(spools)}
        if startup.lacks_plugins():
            found = startup.environment(found)
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sglang.launch_server", *given],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=found,
                start_new_session=True,
            )

    def wait_until_healthy(self, seconds: float, progress: Callable[[float, str], None]) -> None:
        """Wait for ``/health``; ``progress`` gets the seconds waited and the log's last line.

        Raises:
            HsprobeError: it ended, or was not ready in time; the message ends with its log.
        """
        began = time.monotonic()
        while not answers_ok(f"{self.url}/health"):
            self.check()
            waited = time.monotonic() - began
            if waited > seconds:
                raise self._failure(f"The server was not ready after {seconds:.0f} s")
            tail = self.log_tail(1)
            progress(waited, tail[0] if tail else "")
            time.sleep(0.5)

    def check(self) -> None:
        """Raises HsprobeError, with the end of the log, when the server has ended."""
        code = self._process.poll()
        if code is not None:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise self._failure(f"The server ended with {how}")

    def log_tail(self, lines: int) -> list[str]:
        """The last lines of the log that say something."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - 65536))
            text = file.read().decode("utf-8", "replace")
        return [line for line in text.splitlines() if line.strip()][-lines:]

    def stop(self) -> None:
        """End every process of the server, first politely."""
        if self._process.poll() is None:
            self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        # Its children share the group; whatever outlived the parent goes too.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        # Spools are written by processes apart, which end by themselves.
        for spool in self.spools.glob("*.spool"):
            wait_until_closed(spool, STOP_SECONDS)

    def _failure(self, what: str) -> HsprobeError:
        tail = "\n".join(f"    {line}" for line in self.log_tail(LOG_LINES_SHOWN))
        return HsprobeError(f"{what}.", f"The end of its log ({self.log}):\n{tail}")


def _value_of(arguments: Sequence[str], name: str) -> str | None:
    for i, argument in enumerate(arguments):
        if argument == name and i + 1 < len(arguments):
            return arguments[i + 1]
        if argument.startswith(f"{name}="):
            return argument.partition("=")[2]
    return None


def free_port() -> int:
    """A port that is free, and low enough for those that SGLang derives from it.

    0.5.15 takes the one 10,000 above for gRPC, and does not start where that is beyond 65535. It is also
    below those that connections get (32768 and up on Linux): of the attempts to reach a server that does not
    listen yet, one in 28,000 would get the very port it asks for, be joined to itself, and hold the port.
    """
    while True:
        port = random.randrange(*_PORTS)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
