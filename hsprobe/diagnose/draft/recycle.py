"""Whether each step of a chain is given the state that the row before it left.

Shapes: n rows, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from hsprobe.compare.noise import ROW_ALLOWANCE, expected_error
from hsprobe.compare.statistics import Floats, channel_scale, row_errors
from hsprobe.diagnose.draft.material import Material
from hsprobe.diagnose.draft.model import StageLine, Verdict
from hsprobe.diagnose.naming import plural
from hsprobe.diagnose.wording import figure
from hsprobe.draft.timeline import Ints

_SITE = "draft.recycled"
_STRAY = 0.01
_MOST = 4096
_BESIDE = (1, -1, 2, -2, 3, -3)


@dataclass(frozen=True)
class _Candidate:
    """A state that a step may have been given, and the change that would mend it."""

    title: str
    errors: Callable[[], Floats]
    change: str | None = None


class _Given:
    """The states that steps were given, compared with those of other rows."""

    def __init__(self, material: Material, index: Ints) -> None:
        self.material, self.index = material, index
        self.after = material.rows.after[index]
        self.states_nH = material.read(_SITE, index).numpy()
        self.scale_H = channel_scale(self.states_nH)
        self.expected = expected_error(material.dtype, 0)

    def against(self, site: str, rows: Ints) -> Floats:
        """[n] row errors; infinite where a row was not recorded at a site."""
        inside = (rows >= 0) & (rows < len(self.material.rows))
        usable = inside & self.material.holds(site)[np.where(inside, rows, 0)]
        out = np.full(len(rows), np.inf, np.float32)
        if usable.any():
            theirs = self.material.read(site, rows[usable]).numpy()
            out[usable] = self._least(self.states_nH[usable], theirs)
        return out

    def _least(self, ours_nH: Floats, theirs: Floats) -> Floats:
        """Row errors against the nearest of the chunks of width H."""
        width = ours_nH.shape[1]
        starts = range(0, theirs.shape[1] - width + 1, width)
        chunks = [row_errors(ours_nH, theirs[:, k : k + width], self.scale_H) for k in starts]
        least: Floats = np.min(chunks, axis=0)
        return least

    def differ(self, errors: Floats) -> int:
        """How many are not equal."""
        return int((~(errors <= ROW_ALLOWANCE * self.expected)).sum())


def recycled(material: Material) -> tuple[list[StageLine], list[Verdict]]:
    """A line for what steps are given, and a verdict where that is not what the row before left."""
    rows = material.rows
    index = np.flatnonzero((rows.step > 0) & (rows.after >= 0) & material.holds(_SITE))
    right = "draft.final" if material.ref.config.norm_output else "draft.layer"
    index = index[material.holds(right)[rows.after[index]]][:_MOST]
    if len(index):
        # What is not finite was so before it was handed on.
        index = index[np.isfinite(material.read(_SITE, index).numpy()).all(axis=1)]
    if not len(index):
        return [], []
    given = _Given(material, index)
    before = given.against(right, given.after)
    over = given.differ(before)
    ok = over <= _STRAY * len(index)
    line = StageLine(_SITE, float(np.median(before)), given.expected, len(index), over, ok)
    return [line], [] if ok else [_verdict(given, before, right)]


def _verdict(given: _Given, before: Floats, right: str) -> Verdict:
    wrong = ~(before <= ROW_ALLOWANCE * given.expected)
    tried = [(one, one.errors()) for one in _candidates(given, right)]
    left = [float(np.median(found[wrong])) for _, found in tried]
    order = np.argsort(left, kind="stable")
    best, second = int(order[0]), int(order[1])
    one, found = tried[best]
    explained = given.differ(found[wrong]) <= _STRAY * wrong.sum()
    middle = float(np.median(before[wrong]))
    proof = [
        f"{_SITE}: error {figure(middle)} against {right} of the row before, {figure(left[best])} so",
        f"next best of {len(tried)} tried: {tried[second][0].title}: {figure(left[second])}",
    ]
    step = "Hand on the state of the row before, as training did."
    if explained and one.change:
        step = (
            f"Set it in {given.material.served_config}; if it stands there already, the server does not "
            "follow it."
        )
    return Verdict(
        "recycle",
        _SITE,
        one.title if explained else "a step is given a state that no row before it is known to have left",
        one.change if explained else None,
        [step],
        proof,
        left[best],
        middle,
        left[second],
        int(wrong.sum()) - (given.differ(found[wrong]) if explained else 0),
        int(wrong.sum()),
    )


def _candidates(given: _Given, right: str) -> Iterator[_Candidate]:
    after, normed = given.after, right == "draft.final"
    order = "before" if normed else "after"
    now, then = str(not normed).lower(), str(normed).lower()
    yield _Candidate(
        f"each step is given the state {order} the draft's norm; training gave it the one "
        f"{'after' if normed else 'before'}",
        lambda: given.against("draft.layer" if normed else "draft.final", after),
        f"norm_output: {now}  ->  {then}",
    )
    yield _Candidate(
        "each step is given the state that the step before was given: the draft's own output is not used",
        lambda: np.minimum(given.against(_SITE, after), given.against("draft.fc", after)),
    )
    yield _Candidate(
        "each step is given the target's state, not the draft's", lambda: given.against("draft.input", after)
    )
    yield _Candidate(
        "each step is given the attention's output, without the stream that it is added to",
        lambda: given.against("draft.attention", after),
    )
    yield _Candidate(
        "a chain goes on from the last row of its block, accepted or not",
        lambda: given.against(right, _block_ends(given)),
    )
    for by in _BESIDE:
        way = "before" if by < 0 else "after"
        yield _Candidate(
            f"a step is given the state of {plural(abs(by), 'row')} {way} the one it continues",
            lambda by=by: given.against(right, after + by),  # type: ignore[misc]
        )


def _block_ends(given: _Given) -> Ints:
    rows = given.material.rows
    first = rows.step[given.index] == 1
    return np.where(first, rows.last[given.after] - 1, given.after)
