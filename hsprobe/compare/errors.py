"""Row errors of tiles as they are stored; packed types are taken apart by bit arithmetic.

A 32-bit word holds one float32, two 16-bit or four 8-bit values. Moving the k-th of them to the top of its
word, shifting it right until its exponent lies where float32 has it, and masking the rest gives a float32
that is the value times a power of two. So a tile becomes up to four planes with a share of its columns each,
without ever being spread out, and the power of two goes into the weights of the channels.

Sums are taken in float32, by BLAS; rows in which that overflows, underflows or may have lost a small
difference are done again in float64. Each row is summed by itself, so no cut into tiles changes a bit.

Shapes: n rows of a tile, H channels, p values in 32 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsprobe.trace.tensor import to_float32

Floats = NDArray[np.float32]
Array = NDArray[Any]

# Longer sums are cut: BLAS would spread them over threads of its own, and rounding would grow.
_MOST_COLUMNS = 8192
# Outside these bounds a sum of squares in float32 may have overflowed, or lost what matters.
_LEAST_SIZE, _LEAST_GAP = 1e-12, 1e-30


@dataclass(frozen=True)
class _Packed:
    """How a type becomes float32.

    Attributes:
        values: p. shift: how far right a value at the top of a word moves, its sign staying.
        mask: the bits of it then. exponent: the result is to be multiplied by two to this.
        largest: bits of the largest finite value, None where float32 tells NaN and Inf itself.
    """

    values: int
    shift: int
    mask: int
    exponent: int
    largest: int | None


_PACKED = {
    "float32": _Packed(1, 0, 0xFFFFFFFF, 0, None),
    "bfloat16": _Packed(2, 0, 0xFFFF0000, 0, None),
    "float16": _Packed(2, 3, 0x8FFFE000, 112, 0x7BFF),
    "float8_e4m3fn": _Packed(4, 4, 0x87F00000, 120, 0x7E),
    "float8_e5m2": _Packed(4, 3, 0x8FE00000, 112, 0x7B),
}


@dataclass
class Weights:
    """What each channel is multiplied by.

    Args:
        scale: [H] float32, > 0, what it is divided by.
    """

    scale: Floats
    _planes: dict[str, list[Floats] | None] = field(default_factory=dict)

    def planes(self, dtype: str) -> list[Floats] | None:
        """p times [H / p], for the planes of a type; None where float32 cannot hold them."""
        if dtype not in self._planes:
            packed = _PACKED[dtype]
            whole = np.ldexp(1.0 / self.scale.astype(np.float64), packed.exponent)
            fits = bool((whole > 1e-30).all() and (whole < 1e38).all())
            weight = whole.astype(np.float32)
            self._planes[dtype] = (
                [np.ascontiguousarray(weight[k :: packed.values]) for k in range(packed.values)]
                if fits
                else None
            )
        return self._planes[dtype]


class RowErrors:
    """Computes errors, one tile at a time, in buffers that are kept."""

    def __init__(self) -> None:
        self._memory: dict[str, NDArray[np.uint8]] = {}

    def of(self, a_nH: Array, b_nH: Array, dtypes: tuple[str, str], weights: Weights) -> Floats:
        """Per-row distance of two tiles, as `statistics.row_errors` defines it. -> [n]

        Args:
            a_nH, b_nH: in the storage type of their dtype.
            dtypes: the real element type of each.
        """
        n = len(a_nH)
        size, gap = np.zeros(n, np.float32), np.zeros(n, np.float32)
        other, part, odd = np.zeros(n, np.float32), np.empty(n, np.float32), np.zeros(n, bool)
        with np.errstate(all="ignore"):
            for a, b, weight in self._planes(a_nH, b_nH, dtypes, weights, odd):
                for low in range(0, a.shape[1], _MOST_COLUMNS):
                    columns = slice(low, low + _MOST_COLUMNS)
                    x = np.multiply(a[:, columns], weight[columns], out=self._floats("a", a[:, columns]))
                    size += np.vecdot(x, x, out=part)
                    y = np.multiply(b[:, columns], weight[columns], out=self._floats("b", a[:, columns]))
                    other += np.vecdot(y, y, out=part)
                    np.subtract(x, y, out=x)
                    gap += np.vecdot(x, x, out=part)
            np.maximum(size, other, out=size)
            error: Floats = np.sqrt(gap / size)
            finite = np.isfinite(size) & np.isfinite(gap) & ~odd
            sound = finite & (size >= _LEAST_SIZE) & (gap >= _LEAST_GAP)
        if not sound.all():
            same = finite & _same(a_nH, b_nH)
            error[same] = 0.0
            sound |= same
        for row in np.flatnonzero(~sound).tolist():
            error[row] = _closely(a_nH[row], b_nH[row], dtypes, weights.scale)
        return error

    def _planes(
        self,
        a_nH: Array,
        b_nH: Array,
        dtypes: tuple[str, str],
        weights: Weights,
        odd: NDArray[np.bool_],
    ) -> Iterator[tuple[Floats, Floats, Floats]]:
        """Parts of both tiles as float32, and the weights of their channels; marks rows with odd values."""
        dtype, width = dtypes[0], a_nH.shape[1]
        packed = _PACKED.get(dtype) if dtypes[0] == dtypes[1] else None
        planes = weights.planes(dtype) if packed is not None and width % packed.values == 0 else None
        if packed is None or planes is None:
            plain = [to_float32(x, name) for x, name in zip((a_nH, b_nH), dtypes, strict=True)]
            yield plain[0], plain[1], (1.0 / weights.scale).astype(np.float32)
            return
        if packed.values == 1:
            yield a_nH, b_nH, planes[0]
            return
        if packed.largest is not None:
            for raw in (a_nH, b_nH):
                odd |= self._beyond(raw, packed.largest)
        words = [raw.view(np.uint32) for raw in (a_nH, b_nH)]
        for k, weight in enumerate(planes):
            a, b = (self._plane(name, word, k, packed) for name, word in zip("xy", words, strict=True))
            yield a, b, weight

    def _plane(self, name: str, words: NDArray[np.uint32], k: int, packed: _Packed) -> Floats:
        """The k-th value of every word. [n, H / p] -> [n, H / p]"""
        out = self._floats(name, words).view(np.uint32)
        up = 32 - 32 // packed.values * (k + 1)
        source = np.left_shift(words, up, out=out) if up else words
        if packed.shift:
            np.right_shift(source.view(np.int32), packed.shift, out=out.view(np.int32))
            source = out
        # Nothing is left below a value that was moved to the top and stayed there.
        if packed.shift or not up or k:
            np.bitwise_and(source, np.uint32(packed.mask), out=out)
        return out.view(np.float32)

    def _beyond(self, raw: Array, largest: int) -> NDArray[np.bool_]:
        """Rows that hold NaN or Inf, in a type whose bits order as its magnitudes do. -> [n]"""
        bits = raw.view(np.uint16) if raw.dtype.itemsize == 2 else raw
        magnitude = self._floats("z", raw).view(bits.dtype)[:, : raw.shape[1]]
        np.bitwise_and(bits, bits.dtype.type((1 << 8 * bits.dtype.itemsize - 1) - 1), out=magnitude)
        found: NDArray[np.bool_] = magnitude.max(axis=1) > largest
        return found

    def _floats(self, name: str, like: Array) -> Floats:
        """A kept buffer of this shape, float32."""
        size = 4 * like.shape[0] * like.shape[1]
        if name not in self._memory or len(self._memory[name]) < size:
            self._memory[name] = np.empty(size, np.uint8)
        return self._memory[name][:size].view(np.float32).reshape(like.shape)


def _same(a_nH: Array, b_nH: Array) -> NDArray[np.bool_]:
    """Rows that are equal bit for bit. -> [n]"""
    if a_nH.dtype != b_nH.dtype:
        return np.zeros(len(a_nH), bool)
    kind = f"u{a_nH.dtype.itemsize}"
    found: NDArray[np.bool_] = ~(a_nH.view(kind) != b_nH.view(kind)).any(axis=1)
    return found


def _closely(a_H: Array, b_H: Array, dtypes: tuple[str, str], scale_H: Floats) -> float:
    """The error of one row, in float64. NaN where either side is not finite."""
    with np.errstate(invalid="ignore"):
        a, b = (to_float32(x, name).astype(np.float64) for x, name in zip((a_H, b_H), dtypes, strict=True))
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("nan")
    a, b = a / scale_H, b / scale_H
    size = max(float(a @ a), float(b @ b))
    if size == 0:
        # Two rows of zeros are equal.
        return 0.0
    gap = a - b
    return float(np.sqrt(float(gap @ gap) / size))
