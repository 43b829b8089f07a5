"""Keeps what goes wrong in a probe away from the server, and sees that the trace tells of it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from hsprobe.probes.sglang.labels import Pass
from hsprobe.probes.sglang.placing import NotRecordable
from hsprobe.probes.sglang.staging import Stage

logger = logging.getLogger("hsprobe")


class Guarded:
    """What may fail without failing the server.

    Attributes:
        stage: takes the copies; None before the first pass.
        under_way: the pass being recorded, None between passes and where none is to be recorded.
        disarmed: sites whose probes failed, and why.
        early_gaps: gaps that hold for every capture.
    """

    def __init__(self) -> None:
        self.stage: Stage | None = None
        self.under_way: Pass | None = None
        self.disarmed: dict[str, str] = {}
        self.early_gaps: dict[str, None] = {}

    def guard(self, site: str, act: Callable[[], None]) -> None:
        """Run a probe's code; a failure disarms the site, is logged once and recorded as a gap."""
        if site in self.disarmed:
            return
        try:
            act()
        except NotRecordable as error:
            self.gap(site, str(error))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            self.disarmed[site] = reason
            logger.exception("hsprobe disarmed its probe at %s; the server goes on", site)
            self.gap(site, reason)

    def gap(self, site: str | None, reason: str, depth: int | None = None) -> None:
        """Record that something was not recorded, and why."""
        if self.stage is not None:
            number = self.under_way.number if self.under_way else None
            header = {"pass": number, "site": site, "depth": depth, "reason": reason}
            self.stage.spooler.put("gap", header)

    def remember_gap(self, reason: str) -> None:
        """A gap that was known before there was a spool, and that holds for every capture."""
        self.early_gaps[reason] = None

    def no_room(self, current: Pass, size: int) -> None:
        """A pass, or what remains of it, is left out for want of room."""
        if current.short or self.stage is None:
            return
        current.short = True
        budget = self.stage.ring.capacity >> 20
        if self.stage.ring.fits(size):
            reason = f"the writer fell behind, and {budget} MiB of memory were full (HSPROBE_MEMORY)"
        else:
            reason = f"a copy of {size >> 20} MiB is more than the {budget} MiB of memory (HSPROBE_MEMORY)"
        self.stage.ledger.add(reason, current.number)
