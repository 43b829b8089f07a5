"""Keeps what goes wrong in a probe away from the server, and sees that the trace tells of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hsprobe.probes.sglang.labels import Pass
from hsprobe.probes.sglang.placing import NotRecordable
from hsprobe.probes.sglang.proof import DISARMED, Proof
from hsprobe.probes.sglang.staging import Stage

logger = logging.getLogger("hsprobe")


class Guarded:
    """What may fail without failing the server.

    Attributes:
        stage: takes the copies; None before the first pass.
        under_way: the pass being recorded, None between passes and where none is to be recorded.
        disarmed: sites whose probes failed, and why.
        early_gaps: gaps that hold for every capture.
        proof: what the probes have shown of themselves.
    """

    def __init__(self) -> None:
        self.stage: Stage | None = None
        self.under_way: Pass | None = None
        self.disarmed: dict[str, str] = {}
        self.early_gaps: dict[str, None] = {}
        self.proof = Proof(self.disarm)

    def guard(self, site: str, act: Callable[..., None], *arguments: Any) -> None:
        """Run a probe's code; a failure disarms the site, is logged once and recorded as a gap."""
        if site in self.disarmed:
            return
        try:
            act(*arguments)
        except NotRecordable as error:
            self.proof.doubt(site, str(error))
            self.gap(site, str(error))
        except Exception as error:
            logger.exception("hsprobe's probe at %s failed", site)
            self.disarm(site, f"{type(error).__name__}: {error}")

    def disarm(self, site: str, reason: str) -> None:
        """Nothing more is recorded at a site."""
        if site in self.disarmed:
            return
        self.disarmed[site] = reason
        logger.warning("hsprobe disarmed its probe at %s, and the server goes on: %s", site, reason)
        self.gap(site, reason)
        known = self.proof.stopped(site, reason)
        self.tell(self.proof.news() if known else [{"site": site, "state": DISARMED, "why": reason}])

    def tell(self, shown: Sequence[Mapping[str, Any]]) -> None:
        """Record what probes have shown of themselves; the last word on each counts."""
        if self.stage is not None:
            for header in shown:
                self.stage.spooler.put("proof", dict(header))

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
