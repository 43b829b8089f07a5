"""Which candidate is it? Every query against every candidate, row by row.

Shapes: Q queries, C candidates, n rows, H channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hsprobe.compare.align import Pairs, pair, token_twins
from hsprobe.compare.direct import Lane
from hsprobe.compare.noise import MEDIAN_ALLOWANCE, MODEL, Level
from hsprobe.compare.stack import Rows, Stack
from hsprobe.compare.statistics import Floats, row_errors
from hsprobe.compare.tables import blocks

# A candidate that fits twice as well as the next, in nine rows of ten, is the answer even in a noisy capture.
CLEAR_RATIO = 0.5
CLEAR_AGREEMENT = 0.9


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
    for members in _by_stack(candidates, stack):
        other = candidates[members[0]].lane
        pairs = (
            _restrict(pair(stack, other.stack), rows) if other else _own(candidates[members[0]], stack, rows)
        )
        right = other.stack if other else stack
        if not len(pairs):
            continue
        slots = np.searchsorted(rows, pairs.left)
        lanes = [candidates[c].lane for c in members]
        theirs = [lane.scale(pairs.right) if lane else None for lane in lanes]
        for part in blocks(len(pairs), max(stack.width, right.width)):
            left_nW, right_nW = stack.read(pairs.left[part]), right.read(pairs.right[part])
            for q, query in enumerate(queries):
                mine = query.of(left_nW)
                for c, lane, scale in zip(members, lanes, theirs, strict=True):
                    both = scales[q] if scale is None else np.maximum(scales[q], scale)
                    errors[q, c, slots[part]] = row_errors(mine, (lane or query).of(right_nW), both)
    return Matrix(list(candidates), rows, stack.keys.phase[rows], errors)


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
