"""A thread that sees to what no pass reports: answers that have ended, the account of what is missing, and
whether the writer lives. While passes run it hardly does anything, as Python would take turns with them."""

from __future__ import annotations

import logging
import threading
import time

from hsprobe.probes.sglang.requests import Requests
from hsprobe.probes.sglang.shared import RUNNING
from hsprobe.probes.sglang.staging import Stage

logger = logging.getLogger("hsprobe")

TICK_SECONDS = 0.05
BUSY_SECONDS = 1.0
"""How often it works: without passes under way, and between them."""


class Keeper:
    """Runs while a capture is armed, and sleeps otherwise.

    Args:
        stage: where records go. requests: those seen since the capture was armed.

    Attributes:
        steps: counts the scheduler's steps; set by the server's own thread.
    """

    def __init__(self, stage: Stage, requests: Requests) -> None:
        self.steps = 0
        self._stage = stage
        self._requests = requests
        self._armed = threading.Event()
        threading.Thread(target=self._run, name="hsprobe-keeper", daemon=True).start()

    def watch(self, armed: bool) -> None:
        """A capture begins or ends."""
        if armed:
            self._armed.set()
        else:
            self._armed.clear()
            self._hand_over()
            self.write_missing()
            # Of what runs on, nothing more is recorded.
            self._stage.spooler.shared.words[RUNNING] = 0

    def write_missing(self) -> None:
        """Hand over the account of what was not recorded."""
        for missing in self._stage.ledger.take():
            self._stage.spooler.put("missing", missing.header())

    def _run(self) -> None:
        self._attempt(self._stage.spooler.look_after)
        if self._stage.device is not None:
            self._attempt(self._stage.device.enter)
        seen, worked = -1, 0.0
        while True:
            self._armed.wait()
            time.sleep(TICK_SECONDS)
            if self.steps == seen or time.monotonic() - worked > BUSY_SECONDS:
                self._attempt(self._work)
                worked = time.monotonic()
            seen = self.steps

    def _work(self) -> None:
        self._stage.spooler.look_after()
        if self._armed.is_set():
            self._hand_over()
            self.write_missing()
            for header in self._requests.finished():
                self._stage.spooler.put("finished", header)
            self._stage.spooler.shared.words[RUNNING] = self._requests.running

    def _hand_over(self) -> None:
        """What the last passes left."""
        # Never for long: the server's own thread comes here, too.
        if self._stage.lock.acquire(timeout=BUSY_SECONDS):
            try:
                self._stage.flush()
            finally:
                self._stage.lock.release()

    def _attempt(self, act: object) -> None:
        try:
            act()  # type: ignore[operator]
        except Exception:
            logger.exception("hsprobe could not look after its spool; the server goes on")
