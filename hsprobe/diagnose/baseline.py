"""A capture against a baseline: the sketch of an earlier one that was right."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hsprobe.compare.noise import MEDIAN_ALLOWANCE, ROW_ALLOWANCE, STRAY_SHARE, Noise
from hsprobe.compare.sketch import Part, Piece, Sketch, distances, lanes, project
from hsprobe.compare.statistics import Floats
from hsprobe.diagnose.naming import depth_name, plural
from hsprobe.diagnose.wording import figure
from hsprobe.errors import HsprobeError
from hsprobe.remote.location import Location
from hsprobe.trace.reader import Trace

# An estimate from 16 entries of a projection is off by less than this in practically every row.
_SLACK = 2.0


@dataclass(frozen=True)
class Change:
    """One chunk or depth of a baseline in a new capture.

    Attributes:
        error: estimated median row error; noise: what to expect; over, rows: rows that differ, of how many.
        now: where the baseline's states are in the new capture, if they are elsewhere.
        same: whether it is unchanged.
    """

    name: str
    error: float
    noise: float
    over: int
    rows: int
    now: str
    same: bool

    @property
    def sentence(self) -> str:
        """It in a sentence."""
        found = f"error {figure(self.error)}, expected noise {figure(self.noise)}"
        if self.same:
            return f"{self.name} is as in the baseline: {found}"
        moved = f"; its states are now in {self.now}" if self.now else ""
        return f"{self.name} differs from the baseline{moved}: {found}, {self.over}/{self.rows} rows differ"


def against_baseline(baseline: Sketch, capture: Location | str) -> list[Change]:
    """What became of every piece of a baseline in a capture of the same requests.

    Raises:
        HsprobeError: the capture cannot be read, is of another model, or shares no row with the baseline.
    """
    with Trace.open(capture) as trace:
        parts = lanes(trace)
        read = [part.at(baseline.context) for part in parts]
        if not any(there.any() for _, there in read):
            raise HsprobeError(
                f"No row of {capture} has the token ids of a row of the baseline.",
                "Capture the same prompts, or accept a new baseline with --hsprobe-update.",
            )
        layers = baseline.facts.get("num_layers")
        noise = Noise(layers if isinstance(layers, int) and layers > 0 else 32)
        dtype = max(str(baseline.facts.get("dtype") or "float32"), parts[0].stack.dtype, key=_coarseness)
        return [_change(piece, parts, read, noise, dtype) for piece in baseline.pieces]


def _coarseness(dtype: str) -> float:
    return Noise(1).level(1, (dtype, dtype)).expected


def _change(
    piece: Piece, parts: list[Part], read: list[tuple[Floats, np.ndarray]], noise: Noise, dtype: str
) -> Change:
    errors = {}
    for part, (rows, there) in zip(parts, read, strict=True):
        if rows.shape[1] == len(piece.scale):
            known = there & np.isfinite(piece.rows).all(axis=1)
            errors[part.name] = distances(piece.rows[known], project(rows[known], piece.scale))
    depth = piece.depth if isinstance(piece.depth, int) else None
    expected = noise.level(depth, (dtype, dtype)).expected
    mine = errors.get(piece.name, np.zeros(0, np.float32))
    bad = ~(mine <= _SLACK * ROW_ALLOWANCE * expected)
    medians = {name: float(np.median(found)) for name, found in errors.items() if len(found)}
    error = medians.get(piece.name, float("nan"))
    over, rows_seen = int(np.count_nonzero(bad)), len(mine)
    same = error <= MEDIAN_ALLOWANCE * expected and over <= STRAY_SHARE * rows_seen
    fitting = [n for n, m in medians.items() if n != piece.name and m <= MEDIAN_ALLOWANCE * expected]
    names = {part.name: part for part in parts}
    # A depth names it best: another chunk that carries it follows from that.
    fitting.sort(key=lambda name: names[name].chunk)
    now = _named(names[fitting[0]]) if fitting and not same else ""
    return Change(piece.name, error, expected, over, rows_seen, now, same)


def _named(part: Part) -> str:
    if part.chunk:
        return part.name
    depth = part.depth
    return depth_name(depth if isinstance(depth, int) else "final")


def change_lines(changes: list[Change]) -> list[str]:
    """Sentences, those of what changed first; nothing but a count where nothing did."""
    bad = [change for change in changes if not change.same]
    if not bad:
        return [f"{plural(len(changes), 'piece')} as in the baseline"]
    return [change.sentence for change in [*bad, *(c for c in changes if c.same)]]
