"""The residual stream, depth by depth: where the two sides differ, and where they first do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hsprobe.compare.align import Pairs, pair
from hsprobe.compare.direct import Lane, compare
from hsprobe.compare.noise import Level, needed
from hsprobe.compare.shards import Direct
from hsprobe.compare.stack import Stack
from hsprobe.compare.statistics import ErrorStats, row_errors
from hsprobe.diagnose.judge import passes_at, rows_ok
from hsprobe.diagnose.model import Depth, Divergence, GrowthPoint, LayerLine, PhaseLine, State
from hsprobe.diagnose.naming import phase_name
from hsprobe.trace.reader import Trace

LevelsOf = Callable[[Depth, Stack, Stack], dict[int, Level]]


@dataclass(frozen=True)
class Measured:
    """One depth on both sides: `left` served, `right` the reference, `levels` the noise by phase.

    `pairs` says which rows belong together, where that does not follow from the two stacks.
    """

    depth: Depth
    left: Lane
    right: Lane
    direct: Direct
    levels: dict[int, Level]
    pairs: Pairs | None = None

    @property
    def line(self) -> LayerLine:
        """It as a line of the report."""
        return layer_line(self.depth, self.direct, self.levels)


def measure(
    served: Mapping[Depth, Lane], reference: Mapping[Depth, Lane], levels_of: LevelsOf
) -> list[Measured]:
    """Compare every depth that both sides hold, in ascending order, `final` last."""
    found = []
    for depth in sorted(served, key=_order):
        if depth in reference:
            left, right = served[depth], reference[depth]
            levels = levels_of(depth, left.stack, right.stack)
            direct = compare(left, right, {phase: level.row_limit for phase, level in levels.items()})
            if direct.by_phase:
                found.append(Measured(depth, left, right, direct, levels))
    return found


def layer_line(depth: Depth, direct: Direct, levels: Mapping[int, Level]) -> LayerLine:
    """One depth over all phases and in each; it is right if every phase is."""
    total = direct.total
    noise = Level.widest([levels[phase] for phase in direct.by_phase] or levels.values())
    phases = [phase_line(phase, stats, levels[phase]) for phase, stats in sorted(direct.by_phase.items())]
    return LayerLine(
        depth,
        total.median,
        noise.expected,
        total.rows,
        total.over_limit,
        all(line.state is State.OK for line in phases),
        total.nonfinite,
        phases,
        noise.source,
        passes_at(needed(total), phases),
    )


def phase_line(phase: int, stats: ErrorStats, level: Level) -> PhaseLine:
    """One phase of one depth. Rows that are not finite are judged apart."""
    return PhaseLine(
        phase_name(phase),
        stats.rows,
        stats.median,
        stats.over_limit,
        State.OK if rows_ok(stats, level.expected) or not stats.finite else State.DIFFERENT,
        noise=level.expected,
        noise_from=level.source,
        passes_at=needed(stats),
    )


def first_divergence(measured: Sequence[Measured], trace: Trace) -> Divergence | None:
    """The first depth, and in it the earliest row, at which the error exceeds noise; None if none does.

    Args:
        measured: depths in ascending order.
        trace: the served side, whose rows are named.
    """
    for found in measured:
        places = []
        for phase, stats in found.direct.by_phase.items():
            if stats.finite and not rows_ok(stats, found.levels[phase].expected):
                # Where no row sticks out, all are a little too far off: the first of those.
                places.append((stats.first_over if stats.first_over >= 0 else stats.first_above, phase))
        if places:
            row, phase = min(places)
            return _divergence(found, measured, row, phase, trace)
    return None


def _divergence(
    first: Measured, measured: Sequence[Measured], row: int, phase: int, trace: Trace
) -> Divergence:
    keys = first.left.stack.keys
    curve = []
    for found in measured:
        error = _row_error(found, int(keys.row[row]))
        if error is not None:
            curve.append(GrowthPoint(found.depth, error, found.levels[phase].expected))
    here = next(point for point in curve if point.depth == first.depth)
    request, names = int(keys.request[row]), trace.requests.ids
    return Divergence(
        depth=first.depth,
        phase=phase_name(phase),
        request=str(names[request]) if 0 <= request < len(names) else None,
        position=int(keys.position[row]),
        token=int(keys.token[row]),
        error=here.error,
        noise=here.noise,
        curve=curve,
    )


def _row_error(found: Measured, name: int) -> float | None:
    """The error of one row, by its row id, at another depth; None where that depth lacks it."""
    left, right = found.left.stack, found.right.stack
    mine = np.flatnonzero(left.keys.row == name)
    pairs = pair(left, right) if found.pairs is None else found.pairs
    at = np.flatnonzero(np.isin(pairs.left, mine))
    if not len(at):
        return None
    one = Pairs(pairs.left[at[:1]], pairs.right[at[:1]])
    scale = np.maximum(found.left.scale(pairs.left), found.right.scale(pairs.right))
    a, b = found.left.of(left.read(one.left)), found.right.of(right.read(one.right))
    return float(row_errors(a, b, scale)[0])


def _order(depth: Depth) -> int:
    return depth if isinstance(depth, int) else 1 << 30
