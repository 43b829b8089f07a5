"""Starts SGLang servers the way users do, drives them, and reads how much of a run was recorded.

Every server is ``python -m sglang.launch_server`` in a process group of its own. What the environment says
decides whether hsprobe is there: without it on the path, installed but not armed, or armed.
"""

import contextlib
import ctypes
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from struct import Struct

from hsprobe.trace.switch import Switch

HEAD = Struct("<4sIQI")
QUIET_SECONDS = 0.2
"""A spool that nothing is added to for so long had nothing to record."""


@dataclass(frozen=True)
class Kind:
    """One configuration of a server.

    Attributes:
        sites: what hsprobe records; None for a server without hsprobe.
        arguments: more server arguments. environment: more variables.
    """

    name: str
    sites: str | None = None
    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


@dataclass
class Ran:
    """One run of a batch of requests."""

    tokens: int
    seconds: float
    outputs: list[list[int]] = field(repr=False, default_factory=list)
    accept: float | None = None

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


class Server:
    """A running server.

    Args:
        folder: for its log and spools.
        base: arguments that all servers share.
        plain_path, probed_path: ``PYTHONPATH`` without and with hsprobe; None keeps this process's own.
    """

    def __init__(
        self,
        kind: Kind,
        folder: Path,
        base: list[str],
        plain_path: str | None = None,
        probed_path: str | None = None,
    ) -> None:
        self.kind = kind
        self.folder = folder
        self.spools = folder / "spools"
        self.spools.mkdir(parents=True, mode=0o700)
        self.log = folder / "server.log"
        self.port = _free_port()
        environment = {**os.environ, **dict(kind.environment)}
        path = plain_path if kind.sites is None else probed_path
        if path is not None:
            environment["PYTHONPATH"] = path
        for name in [name for name in environment if name.startswith("HSPROBE_") and "CPU" not in name]:
            if name not in dict(kind.environment):
                del environment[name]
        if kind.sites is not None:
            environment |= {"HSPROBE_CAPTURE": str(self.spools), "HSPROBE_SITES": kind.sites}
            environment.setdefault("HSPROBE_MAX_BYTES", "4T")
        arguments = [*base, *kind.arguments, "--port", str(self.port)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "sglang.launch_server", *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=folder,
                start_new_session=True,
            )
        self._offsets: dict[Path, int] = {}

    def healthy(self) -> bool:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2)
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def run(self, prompts: list[list[int]], new_tokens: int, tag: str = "run") -> Ran:
        """Send the prompts at once; tokens over the time from the first sent to the last answered."""
        barrier = threading.Barrier(len(prompts) + 1)
        answers: list[dict | None] = [None] * len(prompts)
        threads = [
            threading.Thread(target=self._ask, args=(i, prompt, new_tokens, f"{tag}-{i}", barrier, answers))
            for i, prompt in enumerate(prompts)
        ]
        for thread in threads:
            thread.start()
        barrier.wait()
        began = time.perf_counter()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - began
        if not all(answers):
            raise RuntimeError(f"{self.kind.name}: a request failed; see {self.log}")
        outputs = [list(answer["output_ids"]) for answer in answers]
        accepts = [answer["meta_info"].get("spec_accept_length") for answer in answers]
        known = [value for value in accepts if value]
        return Ran(sum(map(len, outputs)), seconds, outputs, sum(known) / len(known) if known else None)

    def _ask(self, i, prompt, new_tokens, rid, barrier, answers) -> None:
        body = {
            "input_ids": prompt,
            "rid": rid,
            "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        connection.connect()
        text = json.dumps(body)
        barrier.wait()
        with contextlib.suppress(OSError, ValueError):
            connection.request("POST", "/generate", text, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            content = reply.read()
            if reply.status == 200:
                answers[i] = json.loads(content)

    # Recording

    def arm(self, asked: str = "") -> None:
        Switch(self.spools).turn_on(asked)

    def disarm(self) -> None:
        Switch(self.spools).turn_off()

    def spool_files(self) -> list[Path]:
        """One of each rank."""
        return sorted(self.spools.glob("*.spool"))

    def settle(self, seconds: float = 30.0) -> dict[str, int]:
        """Wait until all is written; passes recorded and missing since the last time, and bytes."""
        tally = {"recorded": 0, "missing": 0, "bytes": 0, "gaps": 0}
        deadline = time.monotonic() + seconds
        for spool in self.spool_files():
            start, last = self._offsets.get(spool, 0), None
            quiet = time.monotonic() + QUIET_SECONDS
            while time.monotonic() < deadline and last != "idle":
                for kind, header, end in _headers(spool, self._offsets.get(spool, 0)):
                    self._offsets[spool], last = end, kind
                    if kind == "pass":
                        tally["recorded"] += 1
                    elif kind == "blocks":
                        tally["recorded"] += len(header["passes"])
                    elif kind == "missing":
                        tally["missing"] += header["passes"]
                    elif kind == "gap":
                        tally["gaps"] += 1
                if last is None and time.monotonic() > quiet:
                    break
                time.sleep(0.02)
            tally["bytes"] += self._offsets.get(spool, 0) - start
        return tally

    def free_disk(self) -> None:
        """Give the spools' blocks back to the disk; their length stays."""
        keep_size_and_punch = 3
        for spool, offset in self._offsets.items():
            if offset > 1 << 20:
                libc = ctypes.CDLL(None, use_errno=True)
                descriptor = os.open(spool, os.O_RDWR)
                length = ctypes.c_long(offset // 4096 * 4096)
                libc.fallocate(descriptor, keep_size_and_punch, ctypes.c_long(0), length)
                os.close(descriptor)

    def processes(self) -> list[Path]:
        """All processes of the server, as folders of /proc; what writes its spools is none of them."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.getpgid(int(folder.name)) == self.process.pid:
                    found.append(folder)
        return found

    def pin(self, cores: set[int]) -> None:
        """Let the server's threads run on these cores only."""
        for folder in self.processes():
            for thread in folder.glob("task/*"):
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(int(thread.name), cores)

    def memory(self) -> int:
        """Resident bytes of the largest process of the server: its scheduler."""
        largest = 0
        for folder in self.processes():
            with contextlib.suppress(OSError, StopIteration):
                lines = (folder / "status").read_text().splitlines()
                line = next(line for line in lines if line.startswith("VmRSS"))
                largest = max(largest, int(line.split()[1]) << 10)
        return largest


def _headers(path: Path, start: int):
    """(kind, header, end) of each whole record from an offset on; payloads are skipped, not checked."""
    size = path.stat().st_size
    with path.open("rb") as file:
        while start + HEAD.size <= size:
            file.seek(start)
            magic, header_size, payload_size, _ = HEAD.unpack(file.read(HEAD.size))
            end = start + HEAD.size + header_size + payload_size
            if magic != b"HSPF" or end > size:
                return
            kind, header = json.loads(file.read(header_size))
            yield kind, header, end
            start = end


def start_all(kinds, folder: Path, base: list[str], plain: str | None, probed: str | None, seconds: float):
    """Start servers together; those that are healthy in time, by the name of their kind."""
    servers = [Server(kind, folder / kind.name, base_of(base, kind), plain, probed) for kind in kinds]
    waiting, ready = list(servers), {}
    deadline = time.monotonic() + seconds
    while waiting and time.monotonic() < deadline:
        for server in list(waiting):
            if server.process.poll() is not None:
                print(f"!! {server.kind.name} ended: {tail(server.log)}", flush=True)
                waiting.remove(server)
            elif server.healthy():
                waiting.remove(server)
                ready[server.kind.name] = server
        time.sleep(0.5)
    for server in waiting:
        print(f"!! {server.kind.name} was not ready in time: {tail(server.log)}", flush=True)
        server.stop()
    return ready


def base_of(base, kind: Kind) -> list[str]:
    """The shared arguments; a function of the kind where they differ."""
    return base(kind) if callable(base) else list(base)


def tail(log: Path, lines: int = 25) -> str:
    text = log.read_text("utf-8", "replace") if log.exists() else ""
    return "\n    ".join(text.splitlines()[-lines:])


def _free_port() -> int:
    """Far enough below 65536 for the ports that a server derives from its own."""
    while True:
        port = random.randrange(20000, 45000)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def prompts(count: int, length: int = 16, seed: int = 0, vocab: int = 32000) -> list[list[int]]:
    """Token ids, all different in their first token."""
    return [
        [
            (7919 * (seed + 1) + 104729 * i + 15485863 * k * (k + i + 1)) % (vocab - 10) + 5
            for k in range(length)
        ]
        for i in range(count)
    ]
