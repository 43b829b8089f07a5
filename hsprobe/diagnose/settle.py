"""Settle what each chunk is: what the server handed over of its own stream, and what the dump holds of it.

The two relations are taken one by one. Served chunk against the server's own stream is one computation and
therefore exact, whatever its precision; training chunk against that stream shows the dump's own faults and
the noise between the two computations. Without the server's stream the training side stands in for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hsprobe.compare.direct import Lane
from hsprobe.compare.noise import ROW_ALLOWANCE, Level, expected_error, strays
from hsprobe.compare.stack import Rows, Stack, spread
from hsprobe.diagnose.account import Accountant, Part, differing, errors_of
from hsprobe.diagnose.evidence import ChunkEvidence, Leftover
from hsprobe.diagnose.model import ChunkLine, Depth, State
from hsprobe.diagnose.search import between
from hsprobe.diagnose.stream import Stream

LevelsOf = Callable[..., dict[int, Level]]
_HALF = 0.5
_ROWS_BETWEEN = 96
_GOOD = (State.OK, State.NO_ROWS, State.SOME_ROWS)


@dataclass(frozen=True)
class TrainedChunk:
    """A training chunk: its lane (None where TRAIN lacks the depth), its depth, how that is known."""

    lane: Lane | None
    depth: Depth
    source: str


@dataclass
class Settler:
    """Settles chunks, one by one.

    Args:
        own: the server's stream; reference: the training side's, where it is a whole model.
        levels: (depth, stacks...) -> noise by phase of the first stack.
        top: L, the depth of `final`.
    """

    own: Stream
    reference: Stream
    chunks: Stream
    levels: LevelsOf
    accountant: Callable[[Sequence[Stream]], Accountant]
    top: int | None

    def settle(
        self, chunk: ChunkEvidence, lane: Lane, trained: TrainedChunk, claimed: Depth
    ) -> ChunkEvidence:
        """The chunk with what its rows are on either side, and what remains unexplained."""
        mine = self.key(trained.depth, chunk.line.index)
        if self.own.states:
            base, bad = self._own_bad(chunk, lane, [claimed, mine])
            streams = [self.own]
        else:
            base, bad = mine, self._direct_bad(chunk, lane, trained)
            streams = [s for s in (self.reference, self.chunks) if s.states]
        prefer = [d for d in (claimed, base, mine) if isinstance(d, int)]
        served = self.accountant(streams).explain(lane, bad, prefer)
        theirs, cross = self._trained_parts(trained, mine)
        return self._put_together(chunk, lane, trained, base, served, theirs, cross)

    def key(self, depth: Depth, index: int) -> int:
        """A depth as a number: `final` is that of the last layer, an unknown one that of the chunk itself."""
        if isinstance(depth, int):
            return depth
        return self.top if depth == "final" and self.top is not None else -1 - index

    def _own_bad(self, chunk: ChunkEvidence, lane: Lane, likely: Sequence[Depth]) -> tuple[int | None, Rows]:
        """(depth that most rows hold, the rows that do not): against the server's own stream."""
        best = chunk.identity.best
        depths = [*likely, best.depth if best is not None else None]
        phases = np.unique(lane.stack.keys.phase).tolist()
        tried: list[tuple[int, int, Rows]] = []
        for depth in dict.fromkeys(d for d in depths if isinstance(d, int) and d in self.own.states):
            limits = dict.fromkeys(phases, ROW_ALLOWANCE * self.own.noise(depth))
            bad, total = _bad_rows(lane, self.own.states[depth], limits)
            tried.append((len(bad), depth, bad))
            if total and len(bad) <= strays(total, lane.stack.routed):
                return depth, bad[:0]
        usable = lane.stack.keys.usable
        if tried:
            count, depth, bad = min(tried, key=lambda one: one[0])
            if count <= _HALF * len(usable) or self._in_some_phases(lane, bad):
                return depth, bad
        return None, _finite(lane, usable)

    def _in_some_phases(self, lane: Lane, bad: Rows) -> bool:
        phases = lane.stack.keys.phase
        return len(np.unique(phases[bad])) < len(np.unique(phases[lane.stack.keys.usable]))

    def _direct_bad(self, chunk: ChunkEvidence, lane: Lane, trained: TrainedChunk) -> Rows:
        if trained.lane is None:
            return _finite(lane, lane.stack.keys.usable)
        levels = self.levels(trained.depth, lane.stack, trained.lane.stack)
        phases = zip(sorted(chunk.direct.by_phase), chunk.line.phases, strict=True)
        whole = frozenset(phase for phase, line in phases if line.state not in _GOOD)
        limits = {phase: level.row_limit for phase, level in levels.items()}
        return differing(lane, trained.lane, limits, whole)

    def _trained_parts(self, trained: TrainedChunk, mine: int) -> tuple[list[Part], Leftover | None]:
        """What the dump's rows are that the server's stream does not bear out at the dump's depth."""
        if trained.lane is None or not self.own.states:
            return [], None
        lane = trained.lane
        stream = Stream(self.own.states, self.own.mids, lambda d: self._cross(d, lane))
        there = mine in stream.states and trained.depth != "final"
        if not there and trained.source == "asked for":
            return [], None
        if not there:
            rows = _finite(trained.lane, trained.lane.stack.keys.usable)
            parts = self.accountant([stream]).explain(trained.lane, rows, [mine])
            return [part for part in parts if part.explained], None
        right = stream.states[mine]
        limits = self.levels(mine, trained.lane.stack, right.stack)
        bad, total = _bad_rows(trained.lane, right, {p: level.row_limit for p, level in limits.items()})
        if len(bad) <= strays(total, right.stack.routed) and not self._off(trained.lane, right, limits):
            return [], None
        whole = (
            bad if 0 < len(bad) <= _HALF * total else _finite(trained.lane, trained.lane.stack.keys.usable)
        )
        parts = self.accountant([stream]).explain(trained.lane, whole, [mine])
        fine = [part for part in parts if part.explained and not _as_it_is(part, mine)]
        left = Leftover(right, trained.lane, mine) if len(fine) < len(parts) else None
        return fine, left

    def _cross(self, depth: int, lane: Lane) -> float:
        other = self.own.states[depth].stack
        return Level.widest(self.levels(depth, lane.stack, other).values()).expected

    def _off(self, left: Lane, right: Lane, limits: Mapping[int, Level]) -> bool:
        """Whether the middle row is further off than noise."""
        _, errors = errors_of(left, right)
        if not len(errors):
            return False
        noise = Level.widest(limits.values()).expected
        return bool(np.nanmedian(errors) > 3 * noise)

    def _put_together(
        self,
        chunk: ChunkEvidence,
        lane: Lane,
        trained: TrainedChunk,
        base: int | None,
        served: list[Part],
        theirs: list[Part],
        cross: Leftover | None,
    ) -> ChunkEvidence:
        mine = self.key(trained.depth, chunk.line.index)
        mended = _one_depth(theirs, mine)
        depths = {int(phase): base for phase in np.unique(lane.stack.keys.phase[lane.stack.keys.usable])}
        fallen = set()
        for part in served:
            if part.reading is not None:
                whole = part.rows >= _HALF * _rows_in(lane, part.phase)
                depths[part.phase] = part.reading.depth if whole else depths[part.phase]
            elif part.origin is None:
                fallen.add(part.phase)
        kept = [part for part in served if not _as_it_is(part, base) or not part.explained]
        kept = [part for part in kept if part.explained]
        left = cross
        # Without the server's stream, only a chunk clearly of the right depth can differ in its values.
        certain = bool(self.own.states) or chunk.line.state in (State.DIFFERENT, State.SOME_ROWS)
        if trained.lane is not None and certain and (fallen or not (self.own.states or served)):
            left = Leftover(lane, trained.lane, mended, handed=bool(self.own.states))
        line = self._line(chunk.line, depths, mended, mine, kept, theirs, bool(fallen), left is not None)
        return replace(
            chunk,
            line=line,
            served=kept,
            trained=theirs,
            depths=depths,
            leftover=left,
            fallen=bool(fallen),
            between=self._between(lane) if fallen and not self.own.mids else None,
        )

    def _between(self, lane: Lane) -> int | None:
        rows = spread(lane.stack.keys.usable, lane.stack.keys, _ROWS_BETWEEN)
        return between(lane, rows, self.own)

    def _line(
        self,
        line: ChunkLine,
        depths: Mapping[int, int | None],
        trained: int,
        declared: int,
        served: Sequence[Part],
        theirs: Sequence[Part],
        fallen: bool,
        left: bool,
    ) -> ChunkLine:
        values = set(depths.values())
        depth = values.pop() if len(values) == 1 else None
        parts = [*served, *theirs]
        form = next((part.reading.words for part in parts if part.reading and part.form.code), "")
        came = next((part.origin.kind.value for part in parts if part.origin is not None), "")
        if trained != declared:
            line = replace(line, trained=trained if trained >= 0 else None, trained_from="identified")
        named = depth if depth is not None and depth >= 0 and not fallen else line.served
        if fallen and not parts:
            return line
        state = line.state
        if form:
            state = State.FORM
        elif came:
            state = State.ROWS
        elif depth is not None and depth != trained:
            state = State.WRONG
        elif left and state is State.WRONG:
            state = State.DIFFERENT
        if line.trained == "final" and named == self.top and not form:
            return line
        return replace(line, served=named, form=form, origin=came, state=state)


def _as_it_is(part: Part, depth: int | None) -> bool:
    """Whether the rows hold the state of this depth itself, of their own place."""
    read = part.reading
    return read is not None and not read.form.code and part.origin is None and read.depth == depth


def _one_depth(parts: Sequence[Part], default: int) -> int:
    depths = {part.reading.depth for part in parts if part.reading is not None}
    return depths.pop() if len(depths) == 1 else default


def _rows_in(lane: Lane, phase: int) -> int:
    keys = lane.stack.keys
    return int(np.count_nonzero(keys.phase[keys.usable] == phase))


def _bad_rows(left: Lane, right: Lane, limits: Mapping[int, float]) -> tuple[Rows, int]:
    """(rows of the left stack over the limit of their phase, finite rows compared)."""
    rows, errors = errors_of(left, right)
    phases = left.stack.keys.phase[rows]
    most = np.zeros(len(rows))
    for phase in np.unique(phases):
        most[phases == phase] = limits[int(phase)]
    return rows[errors > most], int(np.count_nonzero(np.isfinite(errors)))


def _finite(lane: Lane, rows: Rows) -> Rows:
    """The rows of a lane that hold neither NaN nor Inf."""
    found = [
        rows[start : start + 4096][
            np.isfinite(lane.of(lane.stack.read(rows[start : start + 4096])).sum(axis=1))
        ]
        for start in range(0, len(rows), 4096)
    ]
    return np.concatenate(found) if found else rows


def same_process_noise(stack: Stack) -> Callable[[int], float]:
    """The noise between tensors of one pass: rounding to their dtype, whatever the depth."""
    noise = expected_error(stack.dtype, 0)
    return lambda _: noise
