"""Sums over ranks that were never taken: the sum of all ranks is a state, and no single rank is.

With g parts the mean over ranks is `state - (1 - 1/g) * term`, where the term is what the parts add up to.
The
mean, unlike the sum, carries no rounding of the part that every rank holds whole.

Shapes: n rows, H channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hsprobe.compare.direct import Lane
from hsprobe.compare.ranks import Mean, Member, PassRows, Reader
from hsprobe.compare.stack import Rows, Stack, spread
from hsprobe.compare.statistics import Floats, channel_scale, row_errors
from hsprobe.diagnose.forms import Fit, Proposal
from hsprobe.diagnose.ranks.facts import PartialSum
from hsprobe.diagnose.registry import proposals
from hsprobe.diagnose.search import between, search
from hsprobe.diagnose.stream import Stream, View

CODE = "HS703"
TERMS = ("mlp", "attention", "block", "state")
_ROWS = 96
# Rows whose middle one differs by less between ranks are equal up to the rounding of coarse types.
_EQUAL = 0.01


@dataclass(frozen=True)
class Question:
    """One tensor, or chunk, that differs between ranks.

    Attributes:
        where: how it is called. chunk: None for the stream itself.
        lanes: one a rank. speakers: of each class of equal ranks one, by its place in `lanes`.
        own: the stream of each speaker; the first speaks for all where the ranks agree.
        streams: (side, stream) to take the state from, the most telling first.
        prefer: depths that are likely.
    """

    where: str
    chunk: int | None
    members: list[Member]
    lanes: list[Lane]
    speakers: list[int]
    own: list[Stream]
    streams: list[tuple[str, Stream]]
    prefer: list[int]


def partial_sum(question: Question, passes: Mapping[int, PassRows]) -> PartialSum | None:
    """The sum that was not taken; None where the rows are no parts of one."""
    mean = Mean.of([lane.stack for lane in question.lanes], passes)
    usable = mean.keys.usable
    if not len(usable):
        return None
    first = question.lanes[0]
    lane = Lane(mean, first.width, first.chunk, first.depth)
    differing = _differing_phases(question, mean)
    rows = spread(usable[np.isin(mean.keys.phase[usable], differing)], mean.keys, _ROWS)
    if not len(rows):
        return None
    for side, stream in question.streams:
        if not stream.states:
            continue
        forms = _forms(len(question.lanes))
        found = search(lane, rows, stream, forms, question.prefer, moved=False)
        depth, term, parts, fit = -1, "", len(question.speakers), None
        if found is not None and found.form.code == CODE:
            depth, term, fit = found.depth, found.form.term, found.fit
            parts = round(1 / (1 + found.form.factor))
        elif found is None and not stream.mids:
            untold = between(lane, rows, stream)
            depth = -1 if untold is None else untold
        if depth >= 0 and not _alone(question, differing):
            partly = len(differing) < len(np.unique(mean.keys.phase[usable]))
            found_sum = _answer(question, side, stream, depth, term, parts, fit)
            return replace(found_sum, phases=differing if partly else [])
    return None


def _differing_phases(question: Question, mean: Mean) -> list[int]:
    """The phases in which ranks differ at all: a sum may be missing in some and not in others."""
    found, lane = [], question.lanes[0]
    phases = mean.keys.phase[mean.keys.usable]
    for phase in np.unique(phases).tolist():
        rows = spread(mean.keys.usable[phases == phase], mean.keys, _ROWS)
        first, *others = (lane.of(stack.read(index[rows])) for stack, index in mean.parts)
        off = [np.median(row_errors(first, other, channel_scale(first))) for other in others]
        if max(off) > _EQUAL:
            found.append(int(phase))
    return found


def _forms(ranks: int) -> list[tuple[str, Proposal]]:
    """What the mean over ranks is, for every number of parts that the ranks can hold."""
    parts = [g for g in range(ranks, 1, -1) if ranks % g == 0]
    return [(CODE, Proposal(term, (1 / g - 1,), f"{term} in {g} parts")) for term in TERMS for g in parts]


def _alone(question: Question, phases: Sequence[int]) -> bool:
    """Whether a single rank's rows are a state by themselves, in whatever form."""
    for speaker, own in zip(question.speakers, question.own, strict=True):
        lane = question.lanes[speaker]
        keys = lane.stack.keys
        rows = spread(keys.usable[np.isin(keys.phase[keys.usable], phases)], keys, _ROWS)
        streams = [own] if own.states else [stream for _, stream in question.streams]
        for stream in streams:
            if not stream.states:
                continue
            if search(lane, rows, stream, proposals(), question.prefer, moved=False) is not None:
                return True
    return False


def _answer(
    question: Question,
    side: str,
    stream: Stream,
    depth: int,
    term: str,
    parts: int,
    fit: Fit | None,
) -> PartialSum:
    return PartialSum(
        where=question.where,
        chunks=[] if question.chunk is None else [question.chunk],
        depths=[depth],
        term=term,
        over=parts,
        fit=fit,
        alone=min(_error(question.lanes[s], stream.states[depth]) for s in question.speakers),
        members=question.members,
        source=side,
    )


def _error(lane: Lane, state: Lane) -> float:
    """Median row error of one rank against the state."""
    rows = spread(lane.stack.keys.usable, lane.stack.keys, _ROWS)
    mine = lane.of(lane.stack.read(rows))
    theirs = View(lane.stack, rows).read(state)
    errors = row_errors(mine, theirs, channel_scale(theirs))
    finite = errors[np.isfinite(errors)]
    return float(np.median(finite)) if len(finite) else float("nan")


@dataclass
class Summed(Reader):
    """Takes the sum that was not taken: `parts * mean - (parts - 1) * what every rank holds whole`.

    Args:
        stack: the mean over ranks.
        whole: rows of it -> what every rank holds whole. [n] -> [n, H]
        phases: those in which it is missing; empty for all.
        contexts: of the rows in which it is missing; None for all of these phases.
    """

    stack: Stack
    parts: int
    whole: Callable[[Rows], Floats]
    phases: Sequence[int] = ()
    contexts: NDArray[np.uint64] | None = None

    def read(self, rows: Rows, values_nH: Floats) -> Floats:
        """[n], [n, H] -> [n, H]"""
        summed: Floats = self.parts * values_nH - (self.parts - 1) * self.whole(rows)
        if self.phases:
            here = np.isin(self.stack.keys.phase[rows], self.phases)
            if self.contexts is not None:
                here &= np.isin(self.stack.keys.context[rows], self.contexts)
            summed = np.where(here[:, None], summed, values_nH).astype(np.float32)
        return summed


def summed(stack: Stack, found: PartialSum, stream: Stream) -> Summed | None:
    """What puts a chunk of the mean over ranks right; None where it cannot be known.

    Args:
        stream: of the server.
    """
    views: dict[int, Rows] = {}
    everything = View(stack, np.arange(stack.rows))

    def part(lane: Lane, rows: Rows) -> Floats:
        key = id(lane.stack.keys)
        if key not in views:
            views[key] = everything.partners(lane.stack, 0)
        at = views[key][rows]
        out = np.full((len(rows), lane.width), np.nan, np.float32)
        there = at >= 0
        if there.any():
            out[there] = lane.of(lane.stack.read(at[there]))
        return out

    depth = found.depths[0]
    state, before = stream.states.get(depth), stream.states.get(depth - 1)
    middle = stream.mids.get(depth - 1)
    if found.term == "mlp" and middle is not None:
        return Summed(stack, found.over, lambda rows: part(middle, rows))
    if found.term == "block" and before is not None:
        return Summed(stack, found.over, lambda rows: part(before, rows))
    if found.term == "state":
        return Summed(stack, found.over, lambda rows: np.zeros((len(rows), 1), np.float32))
    if found.term == "attention" and state is not None and before is not None and middle is not None:
        return Summed(
            stack, found.over, lambda rows: part(state, rows) - part(middle, rows) + part(before, rows)
        )
    return None


def merged(found: Sequence[PartialSum]) -> list[PartialSum]:
    """Chunks in which the same kind of sum is missing, together."""
    together: dict[tuple[str, int], PartialSum] = {}
    for one in found:
        key = (one.term, one.over) if one.chunks else (one.where, one.over)
        known = together.get(key)
        together[key] = one if known is None else _both(known, one)
    return list(together.values())


def _both(first: PartialSum, second: PartialSum) -> PartialSum:
    depths = dict(zip([*first.chunks, *second.chunks], [*first.depths, *second.depths], strict=True))
    chunks = sorted(depths)
    return replace(first, chunks=chunks, depths=[depths[chunk] for chunk in chunks])
