"""Which depth, in which form, of which row: the simplest reading that explains the rows.

Simple before complex: a reading with a row offset is looked for only where none without explains the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hsprobe.compare.direct import Lane
from hsprobe.compare.stack import Rows
from hsprobe.compare.statistics import Floats, channel_scale
from hsprobe.diagnose.forms import PLAIN, Fit, Form, Proposals, fits
from hsprobe.diagnose.stream import Stream, View

OFFSETS = (-1, 1, -2, 2)
# Rows that must fit: nearly all; fewer with an offset, which has no partner at the edges of a block.
_SHARE, _SHARE_SHIFTED = 0.9, 0.6
# Readings whose errors are this much alike are told apart by what is known, not by the error.
_ALIKE, _FINE = 2.0, 0.5
_MIN_ROWS = 4
# A depth is looked at closely when a few rows leave no more error than this under some form.
_SCOUTS, _PROMISING = 24, 0.4
_NEAR = 2


@dataclass(frozen=True)
class Reading:
    """What some rows of a chunk are.

    Attributes:
        depth: of the state. form: what was made of it. offset: positions from the row's own.
        fit: how well that explains the rows.
        rivals: readings of other classes that explain them as well, in words.
    """

    depth: int
    form: Form
    offset: int
    fit: Fit
    rivals: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        return self.form.named(self.depth)


def search(
    query: Lane,
    rows: Rows,
    stream: Stream,
    proposals: Proposals,
    prefer: Sequence[int],
    *,
    moved: bool = True,
) -> Reading | None:
    """The reading that explains the rows of a lane, None where nothing does.

    Args:
        rows: of the query's stack, ascending.
        prefer: depths that are likelier than others, the likeliest first; they decide between equals.
        moved: whether rows of another position are looked for where no others fit.
    """
    whole = _Rows.of(query, rows)
    few = _Rows.of(query, rows[:: max(1, len(rows) // _SCOUTS)])
    for offsets, share in (((0,), _SHARE), (OFFSETS if moved else (), _SHARE_SHIFTED)):
        found = []
        for offset in offsets:
            for depth in stream.depths:
                # Forms of rows that are moved too are tried where the depth is a likely one.
                forms = proposals if not offset or near(depth, prefer) else ()
                if not any(fit.error <= _PROMISING for fit in few.fits(stream, depth, offset, forms)):
                    continue
                found += [
                    Reading(depth, fit.form, offset, fit)
                    for fit in whole.fits(stream, depth, offset, forms)
                    if fit.good and fit.share >= share and fit.rows >= min(_MIN_ROWS, len(rows))
                ]
        if found:
            return _simplest(found, prefer)
    return None


def near(depth: int, prefer: Sequence[int]) -> bool:
    """Whether a depth is one of the likely ones, or within two of one."""
    return any(abs(depth - likely) <= _NEAR for likely in prefer)


@dataclass(frozen=True)
class _Rows:
    """Some rows of the query: what they hold and their partners."""

    mine_nH: Floats
    view: View

    @classmethod
    def of(cls, query: Lane, rows: Rows) -> _Rows:
        return cls(query.of(query.stack.read(rows)), View(query.stack, rows))

    def fits(self, stream: Stream, depth: int, offset: int, proposals: Proposals) -> list[Fit]:
        around = self.view.around(stream, depth, offset)
        if around is None:
            return []
        return list(fits(self.mine_nH, around, stream.noise(depth), proposals))


def _simplest(found: list[Reading], prefer: Sequence[int]) -> Reading:
    least = min(reading.fit.strain for reading in found)
    alike = [reading for reading in found if reading.fit.strain <= max(_ALIKE * least, _FINE)]
    best = min(alike, key=lambda reading: _cost(reading, prefer))
    rivals = [
        f"{reading.form.named(reading.depth)} (depth {reading.depth})"
        for reading in alike
        if reading.form.code not in ("", best.form.code)
        and _cost(reading, prefer)[0] == _cost(best, prefer)[0]
    ]
    return Reading(best.depth, best.form, best.offset, best.fit, tuple(dict.fromkeys(rivals)))


def _cost(reading: Reading, prefer: Sequence[int]) -> tuple[int, int, int, float]:
    form = reading.form
    if form == PLAIN:
        complexity = 0
    elif form.normed:
        complexity = 2
    else:
        complexity = 1 if form.factor in (-1.0, 1.0) else 3
    place = prefer.index(reading.depth) if reading.depth in prefer else len(prefer)
    return complexity, abs(reading.offset), place, reading.fit.strain


def between(query: Lane, rows: Rows, stream: Stream) -> int | None:
    """The depth d such that the rows lie between d - 1 and d, as the stream within a layer does, if any.

    No proof: a hint for where the stream within layers was not captured.
    """
    view = View(query.stack, rows)
    mine = query.of(query.stack.read(rows))
    best: tuple[float, int] | None = None
    for depth in stream.depths:
        around = view.around(stream, depth)
        if around is None or around.before is None:
            continue
        scale = np.maximum(channel_scale(mine), channel_scale(around.state))
        whole, low, high = (
            np.linalg.norm(gap / scale, axis=1)
            for gap in (around.state - around.before, mine - around.before, around.state - mine)
        )
        inside = np.mean((low < whole) & (high < whole))
        size = float(np.median((low**2 + high**2) / np.maximum(whole**2, 1e-12)))
        if inside >= _SHARE and (best is None or size < best[0]):
            best = (size, depth)
    return None if best is None else best[1]
