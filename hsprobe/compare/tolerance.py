"""Noise as measured between two benign captures, kept in a JSON file.

A file holds figures, one a (depth, phase of the served rows, pair of dtypes): robust quantiles of the row
errors and the number of rows, beside what both captures were. The error to expect follows from a figure as

    expected = safety / MEDIAN_ALLOWANCE * max(median, q995 * MEDIAN_ALLOWANCE / ROW_ALLOWANCE)

so that the middle row of a later comparison may be `safety` times the middle row measured here, and a single
row `safety` times the one that 99.5 % of rows stayed below. The largest row is kept for the reader only: one
sink row must not widen the tolerance for all others.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from hsprobe import __version__
from hsprobe.compare.noise import MEDIAN_ALLOWANCE, ROW_ALLOWANCE, coarsest, epsilon, plain
from hsprobe.compare.stack import Depth
from hsprobe.errors import HsprobeError
from hsprobe.trace.schema import STORAGE, Phase

FORMAT = "hsprobe-tolerance"
SCHEMA_VERSION = 1
SAFETY = 3.0
MAX_SAFETY = 1000.0
MIN_ROWS = 20
"""Fewer rows than these give no quantile worth the name."""

_DRAFT_PHASES = (Phase.DRAFT_EXTEND, Phase.DRAFT_DECODE)
_MAX_BYTES = 16 << 20
_MAX_FIGURES = 100_000
_MAX_DEPTH = 100_000
_AGAIN = "Give a file made by `hsprobe noise`."
_QUANTILES = ("median", "q90", "q99", "q995", "q999", "largest")


@dataclass(frozen=True)
class Figure:
    """Row errors measured at one depth, in one phase, between two dtypes (in ascending order of name).

    Attributes:
        median, q90, q99, q995, q999: quantiles of the row errors, 0..2.
    """

    depth: int | str
    phase: int
    dtypes: tuple[str, str]
    rows: int
    median: float
    q90: float
    q99: float
    q995: float
    q999: float
    largest: float

    def expected(self, safety: float) -> float:
        """The error to expect, never below half a unit of the coarser dtype's last place."""
        measured = max(self.median, self.q995 * MEDIAN_ALLOWANCE / ROW_ALLOWANCE)
        return max(safety / MEDIAN_ALLOWANCE * measured, epsilon(coarsest(*self.dtypes)) / 2)


@dataclass(frozen=True)
class Tolerance:
    """All figures of a file.

    Attributes:
        sides: what the two captures were: path, producer, architecture, num_layers, hidden_size, dtype...
    """

    figures: list[Figure]
    sides: list[dict[str, Any]]
    safety: float = SAFETY
    created: str = ""
    path: Path | None = field(default=None, compare=False)

    @cached_property
    def _table(self) -> dict[tuple[int | str, tuple[str, str]], dict[int, float]]:
        table: dict[tuple[int | str, tuple[str, str]], dict[int, float]] = {}
        for figure in self.figures:
            row = table.setdefault((figure.depth, figure.dtypes), {})
            row[figure.phase] = figure.expected(self.safety)
        return table

    def expected(self, depth: Depth, dtypes: tuple[str, str], phase: int | None) -> float | None:
        """The error to expect, None where nothing was measured.

        An unknown depth is given the widest of all depths, no phase the widest of all phases, and so are the
        draft's own phases: what it is handed is as noisy as what the target computed, in whatever phase.
        """
        pair = pair_of(*dtypes)
        if depth is None:
            rows = [row for (_, other), row in self._table.items() if other == pair]
        else:
            rows = [self._table.get((depth, pair), {})]
        if phase is None or (phase in _DRAFT_PHASES and not any(phase in row for row in rows)):
            return max((value for row in rows for value in row.values()), default=None)
        return max((row[phase] for row in rows if phase in row), default=None)

    def check_model(self, architecture: str | None, num_layers: int | None, hidden: int) -> None:
        """Raise HsprobeError if the figures were measured on another model."""
        mine = {"architecture": architecture, "num_layers": num_layers, "hidden_size": hidden}
        for side in self.sides:
            for name, value in mine.items():
                theirs = side.get(name)
                if value is not None and theirs is not None and theirs != value:
                    # The file may hold anything there.
                    shown = "".join(filter(str.isprintable, str(theirs)))[:60]
                    raise HsprobeError(
                        f"{self.path or 'The tolerance'} was measured on another model: its {name} is "
                        f"{shown}, that of the capture {value}.",
                        "Measure the noise on two benign captures of this model with `hsprobe noise`.",
                    )


def pair_of(left: str, right: str) -> tuple[str, str]:
    """Two dtypes as the key of a figure: noise between them has no direction."""
    first, second = sorted((plain(left), plain(right)))
    return first, second


def write(tolerance: Tolerance, path: Path) -> None:
    """Write a file.

    Raises:
        HsprobeError: it cannot be written.
    """
    facts = {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "hsprobe_version": __version__,
        "created": tolerance.created,
        "safety": tolerance.safety,
        "sides": tolerance.sides,
        "figures": [
            asdict(figure) | {"phase": Phase(figure.phase).name.lower()} for figure in tolerance.figures
        ],
    }
    try:
        path.write_text(json.dumps(facts, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise HsprobeError(
            f"The tolerance cannot be written to {path}: {error.strerror or error}.", "Give another -o FILE."
        ) from error


def read(path: Path) -> Tolerance:
    """Read a file that nobody vouches for.

    Raises:
        HsprobeError: it is missing, no tolerance, of a newer schema, or holds figures that cannot be.
    """
    facts = _document(path)
    if facts.get("format") != FORMAT:
        raise HsprobeError(f"{path} is JSON, but not a tolerance file.", _AGAIN)
    version = facts.get("schema_version")
    if type(version) is not int or version < 1:
        raise _bad(path, "its schema version is not known")
    if version > SCHEMA_VERSION:
        raise HsprobeError(
            f"{path} has schema version {version}, newer than {SCHEMA_VERSION}, which this hsprobe reads.",
            "Update hsprobe.",
        )
    safety = _number(facts.get("safety"), 1.0, MAX_SAFETY)
    if safety is None:
        raise _bad(path, f"its safety factor is not a number from 1 to {MAX_SAFETY:.0f}")
    sides = facts.get("sides")
    if not isinstance(sides, list) or len(sides) != 2 or not all(isinstance(side, dict) for side in sides):
        raise _bad(path, "it does not say which two captures it comes from")
    found = facts.get("figures")
    if not isinstance(found, list) or not 0 < len(found) <= _MAX_FIGURES:
        raise _bad(path, "it holds no list of figures")
    figures = [_figure(entry, path, number) for number, entry in enumerate(found)]
    if len({(f.depth, f.phase, f.dtypes) for f in figures}) != len(figures):
        raise _bad(path, "two of its figures are for the same depth, phase and dtypes")
    created = facts.get("created")
    return Tolerance(figures, sides, safety, created if isinstance(created, str) else "", path)


def _document(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise _bad(path, f"it is larger than {_MAX_BYTES >> 20} MiB")
        facts = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_constant)
    except OSError as error:
        raise HsprobeError(f"{path} cannot be read: {error.strerror or error}.", _AGAIN) from error
    except (ValueError, RecursionError) as error:
        raise HsprobeError(f"{path} is no tolerance file: it is not JSON.", _AGAIN) from error
    if not isinstance(facts, dict):
        raise HsprobeError(f"{path} is JSON, but not a tolerance file.", _AGAIN)
    return facts


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _figure(entry: object, path: Path, number: int) -> Figure:
    if not isinstance(entry, dict):
        raise _bad(path, f"figure {number} is not an object")
    depth, phase, rows = entry.get("depth"), entry.get("phase"), entry.get("rows")
    if depth != "final" and not (type(depth) is int and 0 <= depth <= _MAX_DEPTH):
        raise _bad(path, f"figure {number} names no depth")
    if not isinstance(phase, str) or phase.upper() not in Phase.__members__:
        raise _bad(path, f"figure {number} names no phase")
    dtypes = entry.get("dtypes")
    if not isinstance(dtypes, list) or len(dtypes) != 2 or not all(_known(dtype) for dtype in dtypes):
        raise _bad(path, f"figure {number} does not name two dtypes")
    if type(rows) is not int or not 1 <= rows < 1 << 63:
        raise _bad(path, f"figure {number} has no number of rows")
    read = [_number(entry.get(name), 0.0, 2.0) for name in _QUANTILES]
    values = [value for value in read if value is not None]
    if len(values) != len(read) or values != sorted(values):
        raise _bad(path, f"the quantiles of figure {number} are not ascending numbers from 0 to 2")
    return Figure(depth, Phase[phase.upper()], pair_of(*dtypes), rows, *values)


def _known(dtype: object) -> bool:
    return isinstance(dtype, str) and plain(dtype) in STORAGE


def _number(value: object, low: float, high: float) -> float | None:
    """The value if it is a number (true and false are none) within bounds; NaN is within none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        return None
    return float(value)


def _bad(path: Path, why: str) -> HsprobeError:
    return HsprobeError(f"{path} is no sound tolerance file: {why}.", _AGAIN)


def phases_of(figures: Iterable[Figure]) -> list[int]:
    """The phases that figures cover, ascending."""
    return sorted({figure.phase for figure in figures})
