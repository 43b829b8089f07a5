"""What the rows of a chunk are, phase by phase, where they are not what they should be.

Shapes: n rows, H channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hsprobe.compare.align import pair
from hsprobe.compare.direct import Lane
from hsprobe.compare.direct import errors as row_errors_of
from hsprobe.compare.stack import Rows, spread
from hsprobe.compare.statistics import Floats
from hsprobe.diagnose.forms import PLAIN, Fit, Form, Proposals, gain, rms_normed
from hsprobe.diagnose.norms import Norm, Norms
from hsprobe.diagnose.origin import Kind, Origin, origin, sources, zeros
from hsprobe.diagnose.search import Reading, near, search
from hsprobe.diagnose.stream import Stream, View
from hsprobe.trace.reader import Trace
from hsprobe.trace.schema import Phase

# Candidates are tried on this many rows of a phase; what is found is then confirmed on all.
_SAMPLE = 96
_ROWS_OF_ORIGIN = 256
# The phase that speaks first about rows: one with several rows of a request in a pass can tell more.
_UNSURE = (Kind.OFFSET, Kind.STALE, Kind.REPEATED)
_ORDER = (Phase.PREFILL, Phase.VERIFY, Phase.DRAFT_EXTEND, Phase.DECODE)


@dataclass(frozen=True)
class Part:
    """Rows of a chunk in one phase that are not what they should be.

    Attributes:
        rows: how many.
        reading: which state they hold, in which form. origin: of which rows, where not their own.
        rivals: other classes' readings that cannot be told from this one.
        note: what would tell more, or how it is known.
    """

    phase: int
    rows: int
    reading: Reading | None = None
    origin: Origin | None = None
    note: str = ""

    @property
    def explained(self) -> bool:
        return self.reading is not None or self.origin is not None

    @property
    def form(self) -> Form:
        return PLAIN if self.reading is None else self.reading.form


@dataclass
class Accountant:
    """Explains the rows of one side's chunks by a stream.

    Args:
        streams: where the state may come from, the most telling first.
        traces: "train" and "infer" -> the trace.
    """

    streams: Sequence[Stream]
    proposals: Proposals
    norms: Norms
    traces: Mapping[str, Trace]

    def explain(self, lane: Lane, bad: Rows, prefer: Sequence[int]) -> list[Part]:
        """One part a phase in which rows are bad.

        Args:
            bad: rows of the lane's stack that are not what they should be.
            prefer: depths that are likely, the likeliest first.
        """
        phases = lane.stack.keys.phase[bad]
        parts = [self._part(lane, int(phase), bad[phases == phase], prefer) for phase in np.unique(phases)]
        return _agreed(parts)

    def _part(self, lane: Lane, phase: int, rows: Rows, prefer: Sequence[int]) -> Part:
        part = Part(phase, len(rows))
        unwritten = zeros(lane, _spaced(rows, _ROWS_OF_ORIGIN)) or _constant(lane, _spaced(rows, _SAMPLE))
        if unwritten is not None:
            return replace(part, origin=unwritten)
        for stream in self.streams:
            reading = search(lane, _spaced(rows, _SAMPLE), stream, self.proposals, prefer)
            if reading is not None and reading.form.normed:
                return self._named(part, lane, rows, stream, reading)
            if reading is not None and (reading.offset == 0 or reading.form != PLAIN):
                moved = Origin(Kind.OFFSET, reading.offset, len(rows), len(rows)) if reading.offset else None
                return replace(part, reading=reading, origin=moved)
            depths = (
                [reading.depth]
                if reading
                else _unique([*prefer, *(d for d in stream.depths if near(d, prefer))])
            )
            for depth in depths:
                found = self._origin(lane, rows, stream, depth) if depth in stream.states else None
                if found is not None:
                    fit = reading.fit if reading else Fit(PLAIN, 0.0, 0.0, found.rows / found.of, found.of)
                    return replace(part, reading=Reading(depth, PLAIN, 0, fit), origin=found)
            if reading is not None:
                moved = Origin(Kind.OFFSET, reading.offset, len(rows), len(rows))
                return replace(part, reading=reading, origin=moved)
        return part

    def _origin(self, lane: Lane, rows: Rows, stream: Stream, depth: int) -> Origin | None:
        pool = stream.states[depth]
        source = sources(lane, _spaced(rows, _ROWS_OF_ORIGIN), pool, stream.noise(depth))
        return origin(source, lane.stack, pool.stack, self.traces)

    def _named(self, part: Part, lane: Lane, rows: Rows, stream: Stream, reading: Reading) -> Part:
        """Say which norm it was that the fitted gain belongs to."""
        view = View(lane.stack, _spaced(rows, _SAMPLE))
        around = view.around(stream, reading.depth, reading.offset)
        assert around is not None
        state = around.state if reading.form.term == "norm" else around.middle
        assert state is not None
        fitted = gain(lane.of(lane.stack.read(view.rows)), rms_normed(state))
        norm: Norm = self.norms.name(fitted, reading.depth, reading.form.term, stream.noise(reading.depth))
        form = replace(reading.form, code=norm.code, words=norm.words)
        moved = Origin(Kind.OFFSET, reading.offset, len(rows), len(rows)) if reading.offset else None
        return replace(part, reading=replace(reading, form=form), origin=moved, note=norm.note)


def _agreed(parts: list[Part]) -> list[Part]:
    """One fault of rows has one kind: where passes of one row cannot tell, the others speak."""
    kinds = [p.origin for p in sorted(parts, key=_speaks) if p.origin is not None]
    chosen = next((o for o in kinds if o.kind in _UNSURE), None)
    if chosen is None:
        return parts
    others = _UNSURE if chosen.kind is not Kind.REPEATED else (*_UNSURE, Kind.REQUEST)
    return [
        replace(part, origin=replace(part.origin, kind=chosen.kind, offset=chosen.offset))
        if part.origin is not None and part.origin.kind in others
        else part
        for part in parts
    ]


def _speaks(part: Part) -> int:
    return _ORDER.index(Phase(part.phase)) if part.phase in _ORDER else len(_ORDER)


def _constant(lane: Lane, rows: Rows) -> Origin | None:
    """Whether these rows are all the same, though their tokens differ."""
    if len(rows) < 4 or len(np.unique(lane.stack.keys.token[rows])) < 2:
        return None
    values = lane.of(lane.stack.read(rows))
    same = bool((values == values[:1]).all())
    return Origin(Kind.REPEATED, rows=len(rows), of=len(rows)) if same else None


def _unique(depths: Sequence[int]) -> list[int]:
    return list(dict.fromkeys(depths))


def _spaced(rows: Rows, count: int) -> Rows:
    """At most `count` of the rows, evenly spaced."""
    if len(rows) <= count:
        return rows
    return rows[np.linspace(0, len(rows) - 1, count).astype(np.int64)]


def differing(left: Lane, right: Lane, limits: Mapping[int, float], whole: frozenset[int]) -> Rows:
    """Rows of the left stack that differ from their partners.

    Args:
        limits: phase -> the row error allowed.
        whole: phases of which every finite row is taken, whatever its error.
    """
    rows, errors = errors_of(left, right)
    phases = left.stack.keys.phase[rows]
    most = np.full(len(rows), np.inf)
    for phase in np.unique(phases).tolist():
        most[phases == phase] = -1.0 if phase in whole else limits.get(phase, np.inf)
    with np.errstate(invalid="ignore"):
        found: Rows = rows[errors > most]
    return found


def errors_of(left: Lane, right: Lane) -> tuple[Rows, Floats]:
    """Rows of the left stack that have a partner, and their errors. Each [n]"""
    pairs = pair(left.stack, right.stack)
    if not len(pairs):
        return pairs.left, np.zeros(0, np.float32)
    return pairs.left, row_errors_of(left, right, pairs)


def sample(lane: Lane, rows: Rows, count: int) -> Rows:
    """At most `count` rows, every phase with its share."""
    return spread(rows, lane.stack.keys, count)
