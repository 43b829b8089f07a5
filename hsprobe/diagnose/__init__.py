"""From two traces to findings."""

from __future__ import annotations

from hsprobe.diagnose.diff import diff
from hsprobe.diagnose.model import ChunkLine, Finding, LayerLine, Mend, PhaseLine, Report, State

__all__ = ["ChunkLine", "Finding", "LayerLine", "Mend", "PhaseLine", "Report", "State", "diff"]
