"""What wrong states cost: the draft run offline on both sides' states, one finding undone at a time."""

from __future__ import annotations

from hsprobe.impact.model import Acceptance, Cost, ImpactReport, Reported
from hsprobe.impact.run import impact

__all__ = ["Acceptance", "Cost", "ImpactReport", "Reported", "impact"]
