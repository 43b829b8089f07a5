"""Which candidate is it? Every query against every candidate, row by row.

Shapes: Q queries, C candidates, n rows, H channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hsprobe.compare.against import Against, compared, lent
from hsprobe.compare.align import Pairs, pair, token_twins
from hsprobe.compare.direct import Lane, errors_between
from hsprobe.compare.engine import current
from hsprobe.compare.noise import MEDIAN_ALLOWANCE, MODEL, Level
from hsprobe.compare.shards import Job
from hsprobe.compare.stack import Rows, Stack, runs, spread
from hsprobe.compare.statistics import Floats
from hsprobe.compare.tables import Below, Held, Tables

# A candidate that fits twice as well as the next, in nine rows of ten, is the answer even in a noisy capture.
CLEAR_RATIO = 0.5
CLEAR_AGREEMENT = 0.9
# The same token gives the same embedding, bit for bit; this only allows for the arithmetic of the error.
_EXACT = 1e-6
_MIN_TWINS = 4
# Rows of each phase to begin with, and how often the agreement of a sample may be chance.
_FIRST_ROWS = 96
WRONG = 1e-3
# Bytes to read of the candidates from which on other processes are asked to help: a second's work.
_PAYS = 64 << 20


class Label(NamedTuple):
    """What a candidate stands for: a depth, the final norm's output, or a training chunk of unknown depth."""

    kind: str
    number: int = -1

    @classmethod
    def of(cls, depth: int | str | None, chunk: int | None = None) -> Label:
        if depth == "final":
            return cls("final")
        if isinstance(depth, int):
            return cls("depth", depth)
        return cls("chunk", -1 if chunk is None else chunk)

    @property
    def depth(self) -> int | None:
        return self.number if self.kind == "depth" else None


@dataclass(frozen=True)
class Candidate:
    """A lane and what it stands for. `own` marks candidates made from the query's own rows (see `matrix`)."""

    label: Label
    lane: Lane | None = None
    own: str = ""


# Made from the query itself: the same token elsewhere (only the embedding repeats), and any other row.
TWIN = Candidate(Label("depth", 0), own="twin")
STUCK = Candidate(Label("constant"), own="stuck")


@dataclass(frozen=True)
class Identity:
    """The answer for one query.

    Attributes:
        best, error: the candidate with the lowest median row error, and that error; NaN without rows.
        second, second_error: the next best label.
        agree, rows: rows in which `best` beats every other label, of the rows that could vote.
        expected: noise at which `best` counts as equal; `source` says whether the model or a file gave it.
        errors: median row error of every label that had rows.
    """

    best: Label | None = None
    error: float = float("nan")
    second: Label | None = None
    second_error: float = float("nan")
    agree: int = 0
    rows: int = 0
    expected: float = 0.0
    source: str = MODEL
    errors: dict[Label, float] = field(default_factory=dict)

    def rules_out(self, label: Label) -> bool:
        """Whether another label is clearly right and fits clearly better; equal layers rule out nothing."""
        if self.best is None or self.best == label or not self.clear:
            return False
        return self.error < CLEAR_RATIO * self.errors.get(label, float("inf"))

    @property
    def margin(self) -> float | None:
        """How many times worse the second best fits; None with a single candidate."""
        if self.second is None or self.best is None:
            return None
        # An exact match has no ratio; a tenth of the noise stands in for its error.
        return self.second_error / max(self.error, self.expected / 10, 1e-9)

    @property
    def fits(self) -> bool:
        """Whether the best candidate is equal up to noise."""
        return self.best is not None and self.error <= MEDIAN_ALLOWANCE * self.expected

    @property
    def clear(self) -> bool:
        """Whether the answer can be relied on: nearly all rows agree, and it fits or stands alone."""
        if self.best is None or not self.rows or self.agree < CLEAR_AGREEMENT * self.rows:
            return False
        return self.fits or (self.second is not None and self.error <= CLEAR_RATIO * self.second_error)

    @property
    def confidence(self) -> float:
        """Share of rows that agree, times 1 - error / second error; 0..1."""
        if self.best is None or not self.rows:
            return 0.0
        share = self.agree / self.rows
        if self.second is None:
            return share if self.fits else 0.0
        ratio = self.error / self.second_error if self.second_error > 0 else 1.0
        return share * (1.0 - min(ratio, 1.0))


@dataclass(frozen=True)
class Matrix:
    """Row errors of every query against every candidate: errors [Q, C, n], NaN without a partner."""

    candidates: list[Candidate]
    rows: Rows
    phases: NDArray[np.uint8]
    errors: Floats

    def labels(self, names: dict[int, Label] | None = None) -> list[Label]:
        """Labels of the candidates; `names` gives training chunks the depths they were found at."""
        known = names or {}
        return [
            known.get(c.label.number, c.label) if c.label.kind == "chunk" else c.label
            for c in self.candidates
        ]


def matrix(queries: Sequence[Lane], candidates: Sequence[Candidate], rows: Rows) -> Matrix:
    """Compare lanes of one stack with all candidates on the given rows, reading each stack once."""
    stack = queries[0].stack
    errors = np.full((len(queries), len(candidates), len(rows)), np.nan, np.float32)
    scales = [query.scale(rows) for query in queries]
    mine = Held(rows, stack.read(rows))
    groups = _by_stack(candidates, stack)

    def put(members: list[int], pairs: Pairs, found: Floats) -> None:
        """Errors [queries x candidates, n] against the candidates of one stack."""
        slots = np.searchsorted(rows, pairs.left)
        for q in range(len(queries)):
            for place, c in enumerate(members):
                errors[q, c, slots] = found[q * len(members) + place]

    spread_out = _spread_out(queries, scales, candidates, groups, rows)
    for members, pairs, found in _by_all(spread_out, mine, stack, candidates):
        put(members, pairs, found)
    elsewhere = [members for members, _ in spread_out]
    for members in (members for members in groups if members not in elsewhere):
        other = candidates[members[0]].lane
        pairs = (
            _restrict(pair(stack, other.stack), rows) if other else _own(candidates[members[0]], stack, rows)
        )
        if not len(pairs):
            continue
        jobs = []
        for query, scale in zip(queries, scales, strict=True):
            for lane in (candidates[c].lane for c in members):
                both = scale if lane is None else np.maximum(scale, lane.scale(pairs.right))
                jobs.append(Job(query.columns, (lane or query).columns, both, 0.0))
        right = other.stack if other else stack
        put(members, pairs, errors_between(mine, right, tuple(jobs), pairs, stack.keys.phase[pairs.left]))
    return Matrix(list(candidates), rows, stack.keys.phase[rows], errors)


def _spread_out(
    queries: Sequence[Lane],
    scales: Sequence[Floats],
    candidates: Sequence[Candidate],
    groups: list[list[int]],
    rows: Rows,
) -> list[tuple[list[int], Against]]:
    """Of the groups of candidates those that other processes can reach, if all of them are worth it."""
    stack, size = queries[0].stack, 0
    found: list[tuple[list[int], Against]] = []
    for members in groups if current().spread else ():
        lanes = [lane for c in members if (lane := candidates[c].lane) is not None]
        source, other = stack.source, lanes[0].stack if lanes else stack
        pairs = _restrict(pair(stack, other), rows)
        if not lanes or source is None or other.source is None or not len(pairs):
            continue
        sample = other.sample(np.unique(pairs.right))
        known = other.known_scales(sample, lanes[0].width)
        asked = tuple((query.columns, scale) for query, scale in zip(queries, scales, strict=True))
        columns, phases = tuple(lane.columns for lane in lanes), stack.keys.phase[pairs.left]
        item = Against(
            source, rows, asked, other.source, columns, lanes[0].width, known, sample, pairs, phases
        )
        found.append((members, item))
        size += (len(pairs) + (len(sample) if known is None else 0)) * other.row_bytes
    return found if size >= _PAYS else []


def _by_all(
    found: list[tuple[list[int], Against]], mine: Held, stack: Stack, candidates: Sequence[Candidate]
) -> Iterator[tuple[list[int], Pairs, Floats]]:
    """(members, pairs, errors) of each of these, by the processes there are and by this one."""
    others = [lane.stack for members, _ in found if (lane := candidates[members[0]].lane) is not None]
    if stack.source is None or not found:
        return
    tables = Tables({item.right: Below(other.pieces) for (_, item), other in zip(found, others, strict=True)})
    with lent(stack.source, mine, tables):
        answers = current().map(compared, (item for _, item in found))
        for (members, item), other, (errors, scale) in zip(found, others, answers, strict=True):
            other.learn_scales(item.sample, item.width, scale)
            yield members, item.pairs, errors


def sampled(
    queries: Sequence[Lane],
    candidates: Sequence[Candidate],
    rows: Rows,
    most: int,
    decided: Callable[[Matrix], bool],
) -> Matrix:
    """As `matrix`, on no more of the rows than it takes to decide, and at most `most`.

    A sequential test: it begins with few rows and takes twice as many for as long as `decided` says no, so
    that what is plain costs little and what is not gets all the rows there are.
    """
    keys = queries[0].stack.keys
    count = _FIRST_ROWS * max(1, len(np.unique(keys.phase[rows])))
    while 2 * count <= min(most, len(rows)):
        table = matrix(queries, candidates, runs(rows, keys, count))
        if decided(table):
            return table
        count *= 2
    return matrix(queries, candidates, spread(rows, keys, most))


def settled(identity: Identity) -> bool:
    """Whether more rows would not change the answer: it fits, or stands alone with room to spare.

    Were the best candidate not the best in nine rows of ten, so many rows that agree would be seen once in a
    thousand times.
    """
    if identity.best is None or not identity.clear:
        return False
    alone = identity.second is None or identity.error <= CLEAR_RATIO / 2 * identity.second_error
    return (identity.fits or alone) and _chance(identity.agree, identity.rows) <= WRONG


def _chance(agree: int, rows: int) -> float:
    """How likely at least so many of the rows agree where nine of ten do at heart."""
    share = CLEAR_AGREEMENT
    return sum(
        math.comb(rows, count) * share**count * (1 - share) ** (rows - count)
        for count in range(agree, rows + 1)
    )


def _by_stack(candidates: Sequence[Candidate], stack: Stack) -> list[list[int]]:
    """Indices of candidates grouped by the stack that they are read from."""
    groups: dict[object, list[int]] = {}
    for index, candidate in enumerate(candidates):
        key = id(candidate.lane.stack) if candidate.lane else candidate.own
        groups.setdefault(key, []).append(index)
    return list(groups.values())


def _restrict(pairs: Pairs, rows: Rows) -> Pairs:
    inside = np.isin(pairs.left, rows)
    return Pairs(pairs.left[inside], pairs.right[inside])


def _own(candidate: Candidate, stack: Stack, rows: Rows) -> Pairs:
    if candidate.own == "twin":
        return token_twins(stack, rows)
    # Any row fed another token serves; half the rows away is as good as random and is reproducible.
    other = np.roll(rows, len(rows) // 2)
    differs = stack.keys.token[rows] != stack.keys.token[other]
    return Pairs(rows[differs], other[differs])


def identify(errors_Cn: Floats, labels: Sequence[Label], level: Level) -> Identity:
    """Rank the labels of one query over some rows. A label's error in a row is that of its best candidate."""
    distinct = list(dict.fromkeys(labels))
    stacked = np.full((len(distinct), errors_Cn.shape[1]), np.nan, np.float32)
    for index, label in enumerate(distinct):
        same = [i for i, other in enumerate(labels) if other == label]
        stacked[index] = np.fmin.reduce(errors_Cn[same], axis=0)
    present = np.isfinite(stacked)
    counts = present.sum(axis=1)
    if not len(distinct) or not counts.any():
        return Identity(expected=level.expected, source=level.source)
    enough = counts >= min(4, int(counts.max()))
    medians = np.array(
        [np.median(row[ok]) if use else np.inf for row, ok, use in zip(stacked, present, enough, strict=True)]
    )
    order = np.argsort(medians, kind="stable")
    best = int(order[0])
    voters = present[best]
    rivals = np.where(present, stacked, np.inf)
    rivals[best] = np.inf
    wins = stacked[best, voters] <= rivals[:, voters].min(axis=0)
    second = int(order[1]) if len(order) > 1 and np.isfinite(medians[order[1]]) else None
    return Identity(
        best=distinct[best],
        error=float(medians[best]),
        second=None if second is None else distinct[second],
        second_error=float("nan") if second is None else float(medians[second]),
        agree=int(np.count_nonzero(wins)),
        rows=int(np.count_nonzero(voters)),
        expected=level.expected,
        source=level.source,
        errors={label: float(m) for label, m in zip(distinct, medians, strict=True) if np.isfinite(m)},
    )


def without_own(table: Matrix, query: int) -> Floats:
    """Errors [C, n] of one query; candidates made of its own rows stay only if they fit exactly.

    Deeper layers too give equal tokens similar vectors, so "similar" proves nothing there.
    """
    errors: Floats = table.errors[query].copy()
    twin, stuck = table.candidates.index(TWIN), table.candidates.index(STUCK)
    for index in (twin, stuck):
        seen = errors[index][np.isfinite(errors[index])]
        if len(seen) < _MIN_TWINS or float(np.median(seen)) > _EXACT:
            errors[index] = np.nan
    # Every row being the same, or no two tokens being different, equal rows of equal tokens prove nothing.
    if np.isfinite(errors[stuck]).any() or not np.isfinite(table.errors[query, stuck]).any():
        errors[twin] = np.nan
    return errors
