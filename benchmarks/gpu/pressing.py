"""What each policy does when the writer stands still for some seconds while the server decodes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from pathlib import Path

from servers import Server, prompts

from hsprobe.probes.sglang.pressure import POLICIES

BATCH, NEW_TOKENS = 8, 1400
UNHINDERED = "not hindered"


def measure(server: Server, seconds: float) -> list[str]:
    """A line for each policy: seconds for the same requests, and passes recorded and missing.

    Args:
        seconds: how long the writer stands still; the ring must be full before.
    """
    lines = []
    for policy in (UNHINDERED, *POLICIES):
        server.arm("" if policy == UNHINDERED else json.dumps({"on_pressure": policy}))
        stop = None if policy == UNHINDERED else threading.Timer(0.3, stand_still, (server, seconds))
        if stop:
            stop.start()
        ran = server.run(prompts(BATCH), NEW_TOKENS, f"pressure-{policy.replace(' ', '-')}")
        if stop:
            stop.join()
        tally = server.settle()
        server.disarm()
        server.free_disk()
        passes = tally["recorded"] + tally["missing"]
        lines.append(
            f"| {policy} | {ran.seconds:.2f} s | {passes} | {tally['recorded']} | {tally['missing']} |"
        )
    return lines


def stand_still(server: Server, seconds: float) -> None:
    """Stop the server's writers, and let them go on."""
    writers = writers_of(server.spools)
    if not writers:
        raise RuntimeError(f"{server.kind.name}: no process writes into {server.spools}")
    for writer in writers:
        os.kill(writer, signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        for writer in writers:
            os.kill(writer, signal.SIGCONT)


def writers_of(spools: Path) -> list[int]:
    """Ids of the processes that write spools of a folder."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if b"hsprobe.probes.sglang.writer" in words and any(
                word.startswith(os.fsencode(spools)) for word in words
            ):
                found.append(int(folder.name))
    return found
