"""What happens when the writer falls behind, and the account of what was not recorded for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

POLICIES = ("drop", "block", "sample")
WAIT_SECONDS = 0.0005
MOST_STRIDE = 1024
CALM_STEPS = 64
"""Steps with the ring at most a quarter full before `sample` records more again."""
RANGES_NAMED = 12


@dataclass
class Missing:
    """Passes that were not recorded for one reason.

    Attributes:
        passes: how many. ranges: the first of them, as [first, last] pass numbers.
    """

    reason: str
    asked: bool = False
    passes: int = 0
    ranges: list[list[int]] = field(default_factory=list)

    def add(self, number: int, count: int = 1) -> None:
        """Count `count` passes from `number` on."""
        self.passes += count
        last = number + count - 1
        if self.ranges and self.ranges[-1][1] == number - 1:
            self.ranges[-1][1] = last
        elif len(self.ranges) < RANGES_NAMED:
            self.ranges.append([number, last])

    def header(self) -> dict[str, Any]:
        """As the spool holds it."""
        return {"reason": self.reason, "asked": self.asked, "passes": self.passes, "ranges": self.ranges}


class Ledger:
    """Counts what is missing until it is written down, each reason once. Two threads may share it."""

    def __init__(self) -> None:
        self._missing: dict[str, Missing] = {}
        self._lock = threading.Lock()

    def add(self, reason: str, number: int, count: int = 1, *, asked: bool = False) -> None:
        """`count` passes from `number` on are missing."""
        with self._lock:
            self._missing.setdefault(reason, Missing(reason, asked)).add(number, count)

    def take(self) -> list[Missing]:
        """All that is counted so far; counting then begins anew."""
        if not self._missing:
            return []
        with self._lock:
            taken, self._missing = self._missing, {}
        return list(taken.values())


class Pressure:
    """Decides by policy whether to wait for room, and how many steps to leave out.

    Args:
        policy: "drop" leaves out what finds no room; "block" waits for room, and so slows the server;
            "sample" drops as well, and then records fewer steps until the writer has caught up.
    """

    def __init__(self, policy: str) -> None:
        if policy not in POLICIES:
            raise ValueError(f"{policy!r} is not a policy; the policies are {', '.join(POLICIES)}")
        self.policy = policy
        self.stride = 1
        self._calm = 0

    def wait(self, room: Callable[[], int | None], alive: Callable[[], bool]) -> int | None:
        """There was no room: with "block", try again until there is; else, take note of it."""
        if self.policy == "sample":
            self.stride = min(self.stride * 2, MOST_STRIDE)
            self._calm = 0
        if self.policy != "block":
            return None
        while alive():
            time.sleep(WAIT_SECONDS)
            found = room()
            if found is not None:
                return found
        return None

    def wants(self, step: int, used: float) -> bool:
        """Whether to record this step; `used` is the share of the ring in use."""
        if self.stride == 1:
            return True
        self._calm = self._calm + 1 if used <= 0.25 else 0
        if self._calm >= CALM_STEPS:
            self.stride, self._calm = self.stride // 2, 0
        return step % self.stride == 0
