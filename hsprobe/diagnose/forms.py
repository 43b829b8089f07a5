"""The forms in which a state can be handed over: itself, plus a multiple of one term, or normed.

Every linear form is `base * state + factor * term`, with one term made of the residual stream around the
state and one factor that is either given or fitted. Fault classes say which terms and factors are theirs
(`Proposal`); nothing here knows a class.

Shapes: n rows, H channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hsprobe.compare.noise import MEDIAN_ALLOWANCE, ROW_ALLOWANCE
from hsprobe.compare.statistics import Floats, channel_scale, finite_rows, row_errors

# Rows needed to fit a gain per channel on one half and try it on the other.
_MIN_NORM_ROWS = 8
# A channel whose own noise exceeds this share of its signal is given less say.
_QUIET = 0.1
# A fitted factor this near to a whole number is that number; one this near to zero is no fault.
_WHOLE, _NOTHING = 0.02, 0.03
_EPSILON = 1e-6
# A candidate that is as far off as this in a few rows is none.
_SCREEN_ROWS, _FAR = 16, 0.6
# What is further off than this is not explained, however much rounding a form would excuse.
_MOST = 0.25


@dataclass(frozen=True)
class Form:
    """One form.

    Attributes:
        code: the fault class that proposed it, empty for the state itself.
        term: the name of the term, see `terms`; "norm" and "middle norm" for normed states.
        base, factor: the state is taken `base` times, the term `factor` times.
        words: what it is, with `{above}` for the layer whose output the state is, `{below}` for the next.
    """

    code: str = ""
    term: str = ""
    base: float = 1.0
    factor: float = 0.0
    words: str = ""

    @property
    def normed(self) -> bool:
        return self.term in ("norm", "middle norm")

    def named(self, depth: int | None) -> str:
        """The words, filled in. Empty for the state itself."""
        above = "?" if depth is None else str(depth - 1)
        below = "?" if depth is None else str(depth)
        return self.words.format(above=f"layer {above}", below=f"layer {below}", factor=self._times)

    @property
    def general(self) -> str:
        """The words for several depths at once."""
        return self.words.format(above="its last layer", below="the next layer", factor=self._times)

    @property
    def _times(self) -> str:
        return f"{1 + self.factor:.3g}"


PLAIN = Form()


@dataclass(frozen=True)
class Proposal:
    """Forms that a fault class proposes.

    Attributes:
        term: the term that is added.
        factors: the factors that are tried; empty to fit one, of any size.
        words: as in `Form`; `{factor}` is one plus the factor.
        base: as in `Form`.
    """

    term: str
    factors: tuple[float, ...]
    words: str
    base: float = 1.0


@dataclass(frozen=True)
class Around:
    """The residual stream around one state, as far as it was captured. Each [n, H], NaN without a partner.

    Attributes:
        state: depth d. before: depth d - 1. middle: within layer d - 1. after: within layer d.
    """

    state: Floats
    before: Floats | None = None
    middle: Floats | None = None
    after: Floats | None = None

    @cached_property
    def terms(self) -> dict[str, tuple[Floats, Floats]]:
        """Name -> (term, magnitudes that its rounding comes from). Each [n, H]."""
        state, before, middle, after = self.state, self.before, self.middle, self.after
        found = {"state": (state, np.abs(state))}
        if before is not None:
            found["before"] = (before, np.abs(before))
            found["block"] = _difference(state, before)
        if middle is not None:
            found["middle"] = (middle, np.abs(middle))
            found["mlp"] = _difference(state, middle)
        if middle is not None and before is not None:
            found["attention"] = _difference(middle, before)
        if after is not None:
            found["next attention"] = _difference(after, state)
        return found


def _difference(a: Floats, b: Floats) -> tuple[Floats, Floats]:
    return a - b, np.abs(a) + np.abs(b)


@dataclass(frozen=True)
class Fit:
    """How well one form explains the rows.

    Attributes:
        error: median row error. expected: what rounding alone would leave.
        share: rows that fit, of the `rows` that had a partner.
    """

    form: Form
    error: float
    expected: float
    share: float
    rows: int

    @property
    def strain(self) -> float:
        """Error in units of the expected noise."""
        return self.error / max(self.expected, 1e-12)

    @property
    def good(self) -> bool:
        return self.rows > 0 and self.error <= min(MEDIAN_ALLOWANCE * self.expected, _MOST)


def fits(query_nH: Floats, around: Around, noise: float, proposals: Proposals) -> Iterator[Fit]:
    """Try the state itself, every proposed linear form, and normed states, on the same rows.

    Args:
        noise: relative error of faithful states at this depth.
    """
    screen = _Screen.of(query_nH, around.state, noise)
    for candidate, spread, form in _candidates(query_nH, around, proposals):
        if screen.lets(candidate):
            yield measure(query_nH, candidate, noise, spread, form)


def _candidates(
    query_nH: Floats, around: Around, proposals: Proposals
) -> Iterator[tuple[Floats, Floats, Form]]:
    """(candidate, magnitudes that its rounding comes from, form)."""
    yield around.state, np.abs(around.state), PLAIN
    terms = around.terms
    for code, proposal in proposals:
        if proposal.term not in terms:
            continue
        term, loose = terms[proposal.term]
        base = proposal.base * around.state
        factor = _factor(query_nH, base, term, proposal.factors)
        if factor is None:
            continue
        form = Form(code, proposal.term, proposal.base, factor, proposal.words)
        spread = abs(proposal.base) * np.abs(around.state) + abs(factor) * loose
        yield base + np.float32(factor) * term, spread, form
    for name, state in (("norm", around.state), ("middle norm", around.middle)):
        if state is not None and len(state) >= _MIN_NORM_ROWS:
            fitted = normed(query_nH, state)
            yield fitted, np.abs(fitted), Form(term=name)


@dataclass(frozen=True)
class _Screen:
    """Passes over candidates that are far off in a few rows, before anything dear is computed."""

    query_nH: Floats
    rows: slice
    scale: Floats

    @classmethod
    def of(cls, query_nH: Floats, state_nH: Floats, noise: float) -> _Screen:
        rounding = noise * channel_scale(state_nH) / _QUIET
        scale = np.sqrt(channel_scale(query_nH) ** 2 + rounding**2).astype(np.float32)
        return cls(query_nH, slice(None, None, max(1, len(query_nH) // _SCREEN_ROWS)), scale)

    def lets(self, candidate_nH: Floats) -> bool:
        errors = row_errors(self.query_nH[self.rows], candidate_nH[self.rows], self.scale)
        finite = errors[np.isfinite(errors)]
        return not len(finite) or float(np.median(finite)) <= _FAR


Proposals = Sequence[tuple[str, Proposal]]


def _factor(query: Floats, base: Floats, term: Floats, allowed: tuple[float, ...]) -> float | None:
    """The factor by which the term is in the query: fitted, or the nearest of those allowed."""
    if len(allowed) == 1:
        return allowed[0]
    weight = 1.0 / channel_scale(term)
    t = term * weight
    power = np.einsum("nh,nh->n", t, t)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratios = np.einsum("nh,nh->n", (query - base) * weight, t) / power
    ratios = ratios[np.isfinite(ratios)]
    if not len(ratios):
        return None
    middle = float(np.median(ratios))
    if allowed:
        return min(allowed, key=lambda factor: abs(factor - middle))
    near = round(middle)
    if abs(middle - near) <= _WHOLE * max(1, abs(near)):
        middle = float(near)
    return None if abs(middle) < _NOTHING or abs(middle + 1) < _NOTHING else middle


def measure(query: Floats, candidate: Floats, noise: float, spread: Floats, form: Form) -> Fit:
    """Compare; channels that hold more rounding than signal are given less say.

    Args:
        spread: magnitudes that rounding is relative to. [n, H]
    """
    signal = np.maximum(channel_scale(query), channel_scale(candidate))
    rounding = noise * channel_scale(spread)
    scale = np.sqrt(signal**2 + (rounding / _QUIET) ** 2).astype(np.float32)
    errors = row_errors(query, candidate, scale)
    finite = np.isfinite(errors)
    if not finite.any():
        return Fit(form, float("nan"), noise, 0.0, 0)
    size = np.sqrt(np.mean((candidate[finite] / scale) ** 2, axis=1))
    left = float(np.sqrt(np.mean((rounding / scale) ** 2)))
    expected = left / max(float(np.median(size)), 1e-9)
    values = errors[finite]
    return Fit(
        form,
        float(np.median(values)),
        expected,
        float(np.mean(values <= ROW_ALLOWANCE * expected)),
        int(finite.sum()),
    )


def normed(query_nH: Floats, state_nH: Floats) -> Floats:
    """The states RMS-normed, with a gain per channel fitted on the other half of the rows. -> [n, H]"""
    unit = rms_normed(state_nH)
    out = np.full_like(unit, np.nan)
    halves = np.arange(len(unit)) % 2
    for half in (0, 1):
        out[halves == half] = unit[halves == half] * gain(query_nH[halves != half], unit[halves != half])
    return out


def rms_normed(state_nH: Floats) -> Floats:
    """Each row over its root mean square."""
    unit: Floats = state_nH / np.sqrt(np.mean(state_nH**2, axis=1, keepdims=True) + _EPSILON)
    return unit


def gain(query_nH: Floats, unit_nH: Floats) -> Floats:
    """The factor of each channel that takes `unit` to `query`: the median over its larger values. -> [H]

    A sink row, a thousand times larger in a few channels, would drag a mean along.
    """
    whole = finite_rows(query_nH) & finite_rows(unit_nH)
    unit, query = unit_nH[whole], query_nH[whole]
    size = np.abs(unit)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratios = np.where(size >= np.median(size, axis=0), query / unit, np.nan)
    ratios[~np.isfinite(ratios)] = np.nan
    ratios[:, np.isnan(ratios).all(axis=0)] = 0.0
    found: Floats = np.nanmedian(ratios, axis=0).astype(np.float32)
    return found
