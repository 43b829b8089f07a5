"""Measures what hsprobe costs within one server, while it answers: its states take turns.

Two equal servers, and one server from one second to the next, may differ by more than hsprobe costs. While a
file ``laps`` lies in the server's spool folder, the scheduler goes from lap to lap in one of three states,
each of them once a round, in an order of its own:

    taken out    SGLang's methods are what they were before hsprobe was loaded
    not armed    hsprobe is there, and nothing is recorded
    armed        every pass is recorded

When the file is gone, ``laps.json`` holds [round, state, steps, seconds] of each lap. A step is from one
decoded batch to the next; those beside a prefill do not count, nor do those at the beginning of a lap.
"""

import json
import os
import pkgutil
import random
import sys
import time
from pathlib import Path

from hsprobe.trace.switch import Switch

OUT, RESTING, ARMED = STATES = ("taken out", "not armed", "armed")
SETTLE_SECONDS = 0.03
"""Until a lap counts: hsprobe needs 0.01 s to see that a capture has ended."""
UNHOOK_SECONDS = 0.015
LAP_SECONDS = 0.12
LOOK_STEPS = 16
PREFILL = ("EXTEND", "MIXED", "IDLE")


def install() -> None:
    """Called by SGLang in each of its processes; watches those that run a model."""
    if "sglang.srt.managers.scheduler" in sys.modules and os.environ.get("HSPROBE_CAPTURE"):
        from sglang.srt.managers.scheduler import Scheduler

        laps, original = Laps(Path(os.environ["HSPROBE_CAPTURE"])), Scheduler.process_batch_result

        def processed(self, batch, *args, **kwargs):
            result = original(self, batch, *args, **kwargs)
            laps.step(batch.forward_mode.name not in PREFILL)
            return result

        Scheduler.process_batch_result = processed


class Laps:
    """The state of one scheduler.

    Args:
        folder: its spool folder.
    """

    def __init__(self, folder: Path) -> None:
        self._flag, self._folder = folder / "laps", folder
        self._switch: Switch | None = None
        self._results = folder / "laps.json"
        self._hooked: dict[tuple[object, str], object] = {}
        self._running = False
        self._steps = 0

    def step(self, decoded: bool) -> None:
        """A batch has been processed."""
        self._steps += 1
        if not self._running:
            if self._flag.exists():
                self._begin()
            return
        now = time.perf_counter()
        self._measure(now, decoded)
        if now - self._since > SETTLE_SECONDS + LAP_SECONDS:
            self._next(now)
        if self._steps % LOOK_STEPS == 0 and not self._flag.exists():
            self._finish()

    def _begin(self) -> None:
        self._switch = self._switch or Switch(self._folder)
        self._running, self._round, self._order = True, -1, []
        self._found: list[list] = []
        self._random = random.Random(0)
        self._next(time.perf_counter())

    def _measure(self, now: float, decoded: bool) -> None:
        elapsed = now - self._since
        if self._state == OUT and not self._hooked and elapsed > UNHOOK_SECONDS:
            self._hooked = _unhook()
        counts = decoded and elapsed > SETTLE_SECONDS
        if counts and self._last is not None:
            lap = self._found[-1]
            lap[2] += 1
            lap[3] += now - self._last
        self._last = now if counts else None

    def _next(self, now: float) -> None:
        if not self._order:
            self._round += 1
            self._order = self._random.sample(STATES, len(STATES))
        self._hook_again()
        self._state, self._since, self._last = self._order.pop(), now, None
        if self._state == ARMED:
            self._switch.turn_on()
        else:
            self._switch.turn_off()
        self._found.append([self._round, self._state, 0, 0.0])

    def _finish(self) -> None:
        self._hook_again()
        self._switch.turn_off()
        self._running = False
        fresh = self._results.with_suffix(".new")
        fresh.write_text(json.dumps(self._found))
        fresh.rename(self._results)

    def _hook_again(self) -> None:
        for (owner, name), function in self._hooked.items():
            setattr(owner, name, function)
        self._hooked = {}


def _unhook() -> dict[tuple[object, str], object]:
    """Put the original methods back; returns hsprobe's, by owner and name."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    found = {}
    for target in HookRegistry._patched:
        path, _, name = target.rpartition(".")
        owner = pkgutil.resolve_name(path)
        original = getattr(owner.__dict__.get(name), "__wrapped__", None)
        if original is not None:
            found[owner, name] = owner.__dict__[name]
            setattr(owner, name, original)
    return found
