"""From errors to the state of a chunk or a layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hsprobe.compare.noise import MEDIAN_ALLOWANCE, strays
from hsprobe.compare.shards import Direct
from hsprobe.compare.statistics import ErrorStats
from hsprobe.diagnose.identify import Identity, Label
from hsprobe.diagnose.model import PhaseLine, State


@dataclass(frozen=True)
class Verdict:
    """State over all rows, and phase by phase."""

    state: State
    phases: dict[int, State]


def judge(direct: Direct, overall: Identity, by_phase: dict[int, Identity], wanted: Label) -> Verdict:
    """State of a served chunk.

    Args:
        direct: served against trained; empty where there is nothing to compare with directly.
        overall, by_phase: what the served chunk was identified as.
        wanted: what it should be.
    """
    whole = judge_rows(direct.total, overall, wanted)
    phases = {
        phase: judge_rows(stats, by_phase.get(phase, Identity(expected=overall.expected)), wanted)
        for phase, stats in direct.by_phase.items()
    }
    bad = [state for state in phases.values() if state not in (State.OK, State.NO_ROWS)]
    if whole is State.OK and bad:
        whole = bad[0]
    return Verdict(whole, phases)


def judge_rows(stats: ErrorStats, identity: Identity, wanted: Label) -> State:
    """State of one group of rows. Identification speaks first; the error then says how well it fits."""
    error = stats.median
    if _is_other(identity, wanted, error):
        return State.WRONG
    if not stats.finite:
        # Without a direct partner (a depth that the training side lacks) the identification alone decides.
        named = identity.clear and identity.best == wanted
        return State.OK if named and identity.fits else State.NO_ROWS
    if error <= MEDIAN_ALLOWANCE * identity.expected:
        return State.SOME_ROWS if stats.over_limit > strays(stats.finite, stats.routed) else State.OK
    if identity.clear and identity.best == wanted:
        return State.DIFFERENT
    return State.UNKNOWN


def _is_other(identity: Identity, wanted: Label, error: float) -> bool:
    """Whether the rows are clearly something else than wanted."""
    if identity.best is None or identity.best.kind == "constant" or not identity.rules_out(wanted):
        return False
    if wanted.kind == "chunk" and identity.best.kind != "chunk":
        # The depth of the training chunk is unknown, so another depth proves nothing; but the embedding
        # where the direct comparison fails is one fault that needs no more evidence.
        return identity.best.depth == 0 and error > MEDIAN_ALLOWANCE * identity.expected
    return True


def rows_ok(stats: ErrorStats, noise: float) -> bool:
    """Whether the finite rows are equal up to noise, and there are any."""
    within = stats.finite > 0 and stats.median <= MEDIAN_ALLOWANCE * noise
    return within and stats.over_limit <= strays(stats.finite, stats.routed)


def passes_at(total: float | None, phases: Sequence[PhaseLine]) -> float | None:
    """The least noise at which all rows and every phase would pass; None where one never would."""
    needs = [total, *(line.passes_at for line in phases)]
    known = [need for need in needs if need is not None]
    if len(known) != len(needs):
        return None
    return max((need for need in known if not math.isnan(need)), default=math.nan)
