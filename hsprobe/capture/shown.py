"""What the probes have shown of themselves at start, over all ranks, for a trace's provenance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

STATES = ("proven", "unproven", "disarmed")
"""From best to worst."""


@dataclass(frozen=True)
class Shown:
    """The last word on one probe.

    Attributes:
        state: "proven" (it sees what it says), "unproven" or "disarmed".
        why: why it is not proven.
    """

    state: str
    why: str

    @property
    def badness(self) -> int:
        return STATES.index(self.state) if self.state in STATES else STATES.index("unproven")


def joined(ranks: Sequence[tuple[int, Mapping[str, Shown]]]) -> dict[str, dict[str, object]]:
    """Site -> its worst state on any rank, why, and on which ranks where others fare better."""
    found: dict[str, dict[str, object]] = {}
    for site in sorted({site for _, shown in ranks for site in shown}):
        said = [(rank, shown[site]) for rank, shown in ranks if site in shown]
        worst = max((one for _, one in said), key=lambda one: one.badness)
        where = [rank for rank, one in said if one.badness == worst.badness]
        found[site] = {"state": worst.state}
        if worst.why:
            found[site]["why"] = worst.why
        if len(where) < len(said):
            found[site]["ranks"] = where
    return found
