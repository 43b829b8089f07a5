"""States of the right depth, form and row that differ all the same: what the difference is like.

Shapes: n rows, H channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hsprobe.compare.align import Pairs, pair
from hsprobe.compare.direct import Lane
from hsprobe.compare.direct import errors as row_errors_of
from hsprobe.compare.stack import Keys, Rows
from hsprobe.compare.statistics import Floats

_SAMPLE = 512
# Shares from which a difference is called by that name.
_MOSTLY, _NEARLY_ALL, _ALL = 0.5, 0.9, 0.95
_FEW_DIRECTIONS = 4
_MANTISSA = 23


@dataclass(frozen=True)
class Shape:
    """What a difference is like, from a sample of rows, with channels weighted by their size.

    Attributes:
        constant: share of its energy in one vector, the same in every row.
        low_rank: share of its energy in its first four directions.
        scale: the factor that takes the trained states to the served ones.
        scaled: share of the energy that this factor explains.
        gram: correlation of the row-by-row inner products of both sides; 1 for a rotation.
        channels: share of its energy in the loudest hundredth of the channels.
        bits: significant mantissa bits of (served, trained) values.
    """

    constant: float
    low_rank: float
    scale: float
    scaled: float
    gram: float
    channels: float
    bits: tuple[int, int]


@dataclass(frozen=True)
class Difference:
    """Two lanes that differ beyond depth, form and rows.

    Attributes:
        chunk, depth: what is compared. handed: whether it is the served chunk that differs, not the stream.
        rows, bad: rows compared, and those over the limit of a single row.
        error, noise: median row error, and the error to expect.
        spread: row error that nine rows of ten stay below, over that which one of ten does.
        placeholder: the token id to whose spans the difference is confined, None if it is not.
        spans: how many these are.
    """

    chunk: int
    depth: int
    handed: bool
    rows: int
    bad: int
    error: float
    noise: float
    spread: float
    placeholder: int | None
    spans: int
    shape: Shape

    @property
    def everywhere(self) -> bool:
        """Whether all rows are concerned, and not some."""
        return self.bad >= _NEARLY_ALL * self.rows or self.error > 3 * self.noise

    @property
    def isotropic(self) -> bool:
        """Whether it looks like noise: no constant, no scale, no few directions, in all rows alike."""
        shape = self.shape
        structured = max(shape.constant, shape.scaled) >= _MOSTLY or shape.low_rank >= _NEARLY_ALL
        return self.everywhere and not structured


def difference(
    chunk: int, depth: int, handed: bool, left: Lane, right: Lane, noise: float
) -> Difference | None:
    """Compare the lanes row by row; None where no row has a partner.

    Args:
        noise: error to expect; a single row may have ten times that.
    """
    pairs = pair(left.stack, right.stack)
    if not len(pairs):
        return None
    errors = row_errors_of(left, right, pairs)
    finite = np.isfinite(errors)
    pairs, errors = Pairs(pairs.left[finite], pairs.right[finite]), errors[finite]
    if not len(errors):
        return None
    bad = errors > 10 * noise
    placeholder, spans = _placeholder(left.stack.keys, pairs.left, bad)
    chosen = np.flatnonzero(bad) if bad.any() else np.arange(len(errors))
    chosen = chosen[np.linspace(0, len(chosen) - 1, min(len(chosen), _SAMPLE)).astype(np.int64)]
    a = left.of(left.stack.read(pairs.left[chosen]))
    b = right.of(right.stack.read(pairs.right[chosen]))
    low, high = np.quantile(errors, [0.1, 0.9])
    return Difference(
        chunk=chunk,
        depth=depth,
        handed=handed,
        rows=len(errors),
        bad=int(bad.sum()),
        error=float(np.median(errors)),
        noise=noise,
        spread=float(high / max(low, 1e-12)),
        placeholder=placeholder,
        spans=spans,
        shape=_shape(a, b, np.maximum(left.scale(pairs.left), right.scale(pairs.right))),
    )


def _shape(served_nH: Floats, trained_nH: Floats, scale_H: Floats) -> Shape:
    a, b = (served_nH / scale_H).astype(np.float64), (trained_nH / scale_H).astype(np.float64)
    gap = a - b
    # One loud row may not speak for all.
    gap /= np.maximum(np.linalg.norm(gap, axis=1, keepdims=True), 1e-12)
    energy = float(np.sum(gap**2))
    mean = gap.mean(axis=0)
    values = np.linalg.svd(gap - mean, compute_uv=False) if len(gap) > _FEW_DIRECTIONS else np.ones(1)
    ratios = np.sum(a * b, axis=1) / np.maximum(np.sum(b * b, axis=1), 1e-12)
    factor = float(np.median(ratios))
    whole = np.sum((a - b) ** 2, axis=1)
    left = np.sum((a - factor * b) ** 2, axis=1)
    per_channel = np.sort(np.sum(gap**2, axis=0))[::-1]
    return Shape(
        constant=len(gap) * float(np.sum(mean**2)) / max(energy, 1e-12),
        low_rank=float(np.sum(values[:_FEW_DIRECTIONS] ** 2) / max(np.sum(values**2), 1e-12)),
        scale=factor,
        scaled=float(np.median(1 - left / np.maximum(whole, 1e-12))),
        # In the channels as they are: a rotation mixes loud and quiet ones.
        gram=_gram(served_nH.astype(np.float64), trained_nH.astype(np.float64)),
        channels=float(per_channel[: max(1, len(per_channel) // 100)].sum() / max(energy, 1e-12)),
        bits=(significant_bits(served_nH), significant_bits(trained_nH)),
    )


def _gram(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Correlation of the inner products of rows with one another, on at most 128 rows."""
    if len(a) < _FEW_DIRECTIONS:
        return float("nan")
    upper = np.triu_indices(min(len(a), 128), 1)
    x, y = (one[:128] @ one[:128].T for one in (a, b))
    if np.std(x[upper]) == 0 or np.std(y[upper]) == 0:
        return float("nan")
    return float(np.corrcoef(x[upper], y[upper])[0, 1])


def significant_bits(values: Floats) -> int:
    """Mantissa bits that nearly all values make do with: 23 for float32, 7 for bfloat16, 3 for fp8 e4m3."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32) & ((1 << _MANTISSA) - 1)
    used = bits[bits != 0]
    if not len(used):
        return 0
    lowest = (used & (~used + np.uint32(1))).astype(np.float64)
    return int(_MANTISSA - np.quantile(np.log2(lowest), 0.01))


def _placeholder(keys: Keys, rows: Rows, bad: NDArray[np.bool_]) -> tuple[int | None, int]:
    """(token id, number of spans) if the bad rows are the spans of one repeated token in each request.

    Rows after a span may differ too, since they attend to it; what counts is that the first to differ is the
    span's own, that all of the span does, and that requests without one are right.
    """
    if not bad.any() or bad.mean() > _NEARLY_ALL:
        return None, 0
    request, position, token = keys.request[rows], keys.position[rows], keys.token[rows]
    tokens, spans, before = [], 0, 0
    for one in np.unique(request[bad]):
        here = np.flatnonzero(request == one)
        here = here[np.argsort(position[here], kind="stable")]
        first = int(np.argmax(bad[here]))
        name = int(token[here[first]])
        same = token[here] == name
        run = same[first : first + 2]
        if len(run) < 2 or not run.all() or bad[here][same].mean() < _ALL:
            return None, 0
        tokens.append(name)
        spans += int(np.count_nonzero(np.diff(same.astype(np.int8)) == 1)) + int(same[0])
        before += first
    return (tokens[0], spans) if before else (None, 0)
