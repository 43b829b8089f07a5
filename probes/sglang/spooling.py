"""A rank's spool, as the server sees it: records go into shared memory, and a process of its own writes them.

The server does no more for a record than to append it there: a writer among the server's threads would run
Python in turns with the scheduler, which costs a small model a tenth of its speed.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from hsprobe.probes.sglang.shared import WRITER, Entry, Life, Shared

logger = logging.getLogger("hsprobe")

JOURNAL_BYTES = 8 << 20
MOST_LATE = 4096
"""Records without bytes that are kept for later while the journal is full."""
START_SECONDS = 60
_MODULE = "hsprobe.probes.sglang.writer"


class Spooler:
    """Hands records to the writer, in the order in which they are given. Safe to call from several threads.

    A failing disk, or `max_bytes`, or the writer's death, ends the recording, never the server.

    Args:
        path: the spool.
        max_bytes: size of payloads at which recording stops.
        capacity: bytes of the ring in which payloads lie.

    Attributes:
        shared: the memory.
        writer_died: what became of a writer that is no more.
    """

    def __init__(self, path: Path, max_bytes: int, capacity: int) -> None:
        self.path = path
        self.shared = Shared.create(JOURNAL_BYTES, capacity)
        self.writer_died: str | None = None
        self._lock = threading.Lock()
        self._late: deque[Entry] = deque(maxlen=MOST_LATE)
        self._life: Life | None = None
        self._told = False
        self._began = time.monotonic()
        numbers = (self.shared.descriptor, JOURNAL_BYTES, capacity, max_bytes, os.getpid())
        self._starting: subprocess.Popen[bytes] | None = _start(
            ["write", *map(str, numbers), str(path)], (self.shared.descriptor,)
        )

    @property
    def stopped(self) -> str | None:
        """Why nothing is written any more."""
        return self.writer_died or self.shared.stopped

    def put(self, kind: str, header: dict[str, Any]) -> None:
        """Hand over one record without bytes; where there is no room now, later."""
        entry: Entry = ((), -1, [(kind, header, ())])
        if not self.submit(entry):
            self._late.append(entry)

    def submit(self, entry: Entry) -> bool:
        """Hand over records together; False without room. A spool that has stopped takes everything.

        Raises:
            ValueError: they hold what cannot be written down.
        """
        if self.writer_died or self.shared.stopped:
            return True
        with self._lock:
            while self._late:
                if not self.shared.append(self._late[0]):
                    return False
                self._late.popleft()
            return self.shared.append(entry)

    def look_after(self) -> None:
        """See whether the writer lives; to be called now and then, from one thread."""
        if self._starting is not None:
            try:
                code = self._starting.wait(START_SECONDS)
            except subprocess.TimeoutExpired:
                code = -1
            self._starting = None
            if code:
                self.writer_died = f"the process that writes the spool did not start (exit code {code})"
        if self._life is None and self.shared.words[WRITER]:
            self._life = Life(self.shared.words[WRITER])
        if self._life is None and time.monotonic() - self._began > START_SECONDS:
            self.writer_died = f"the process that writes the spool did not start within {START_SECONDS} s"
        if self.writer_died is None and self.shared.stopped is None and self._life and self._life.ended:
            self.writer_died = "the process that writes the spool has ended; what it had not written is lost"
            _start(["note", str(self.path), self.writer_died]).wait(START_SECONDS)
        if self.stopped is not None and not self._told:
            self._told = True
            logger.error("hsprobe stopped recording in process %d: %s", os.getpid(), self.stopped)


def _start(arguments: list[str], descriptors: tuple[int, ...] = ()) -> subprocess.Popen[bytes]:
    """The writer's program in an interpreter of its own, which no signal to the server's group reaches."""
    environment = {name: value for name, value in os.environ.items() if name != "HSPROBE_CAPTURE"}
    return subprocess.Popen(
        [sys.executable, "-m", _MODULE, *arguments],
        stdin=subprocess.DEVNULL,
        pass_fds=descriptors,
        env=environment,
        start_new_session=True,
    )
