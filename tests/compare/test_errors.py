"""Row errors of packed types, against the definition in float64. Shapes: n rows, H channels."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from hsprobe.compare.errors import RowErrors, Weights
from hsprobe.trace.schema import STORAGE

TYPES = ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float64", "float8_e4m3fnuz"]


def _stored(values: np.ndarray, dtype: str) -> np.ndarray:
    return values.astype(np.dtype(getattr(ml_dtypes, dtype, dtype))).view(STORAGE[dtype])


def _defined(a: np.ndarray, b: np.ndarray, dtypes: tuple[str, str], scale: np.ndarray) -> Any:
    def plain(x: np.ndarray, dtype: str) -> np.ndarray:
        return x.view(np.dtype(getattr(ml_dtypes, dtype, dtype))).astype(np.float64) / scale

    with np.errstate(invalid="ignore"):
        x, y = plain(a, dtypes[0]), plain(b, dtypes[1])
        size = np.maximum((x * x).sum(axis=1), (y * y).sum(axis=1))
        error = np.sqrt(((x - y) ** 2).sum(axis=1) / np.where(size == 0, 1, size))
        error[~(np.isfinite(x).all(axis=1) & np.isfinite(y).all(axis=1))] = np.nan
    return error


def _rows(n: int = 23, width: int = 64) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(4)
    a = rng.normal(size=(n, width)).astype(np.float32) * rng.uniform(0.1, 20, width).astype(np.float32)
    b = a * (1 + 0.2 * rng.normal(size=a.shape)).astype(np.float32)
    a[0], b[1], a[2], b[2] = 0, 0, 0, 0
    b[3] = a[3]
    a[4, 7], b[5, 63], a[6, 0], b[6, 0] = np.nan, np.nan, np.nan, np.nan
    return a, b, rng.uniform(0.05, 20, width).astype(np.float32)


@pytest.mark.parametrize("right", TYPES)
@pytest.mark.parametrize("left", TYPES)
@pytest.mark.parametrize("width", [64, 63])
def test_every_pair_of_types_gives_the_error_defined(left: str, right: str, width: int) -> None:
    a, b, scale = (part[..., :width] for part in _rows())
    x, y = _stored(a, left), _stored(b, right)
    found = RowErrors().of(x, y, (left, right), Weights(np.ascontiguousarray(scale)))
    assert found == pytest.approx(_defined(x, y, (left, right), scale), rel=1e-4, abs=1e-7, nan_ok=True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_every_value_of_a_type_is_itself(dtype: str) -> None:
    bits = 8 * np.dtype(STORAGE[dtype]).itemsize
    every = np.arange(1 << bits, dtype=f"u{bits // 8}").view(STORAGE[dtype])
    # One value a row beside a one, so that each counts and none is alone.
    one = _stored(np.ones(1, np.float32), dtype)[0]
    rows = np.repeat(every[:, None], 4, axis=1)
    other = np.full_like(rows, one)
    found = RowErrors().of(rows, other, (dtype, dtype), Weights(np.ones(4, np.float32)))
    with np.errstate(over="ignore"):
        wanted = _defined(rows, other, (dtype, dtype), np.ones(4))
    assert found == pytest.approx(wanted, rel=1e-5, nan_ok=True)


def test_equal_rows_are_exactly_equal_and_the_least_difference_is_one() -> None:
    a = _rows()[0][7:]
    b = a.copy()
    b[3, 9] = np.nextafter(b[3, 9], np.float32(np.inf))
    a[5, :] = b[5, :] = 1e-30
    b[5, 1] = 2e-30
    found = RowErrors().of(a, b, ("float32", "float32"), Weights(np.ones(64, np.float32)))
    assert found[3] > 0
    assert found[5] == pytest.approx(1 / 67**0.5, rel=1e-5)
    assert not np.delete(found, [3, 5]).any()


def test_values_at_the_ends_of_float32_are_compared() -> None:
    a, b = (np.full((2, 16), v, np.float32) for v in (3e38, -3e38))
    a[1], b[1] = 1e-38, 3e-38
    found = RowErrors().of(a, b, ("float32", "float32"), Weights(np.full(16, 1e-3, np.float32)))
    assert found == pytest.approx([2.0, 2 / 3], rel=1e-5)


def test_a_row_is_the_same_whatever_stands_around_it() -> None:
    a, b, scale = _rows(40, 9000)
    for dtype in ("float32", "bfloat16"):
        x, y = _stored(a, dtype), _stored(b, dtype)
        weights, whole = Weights(scale), RowErrors()
        together = whole.of(x, y, (dtype, dtype), weights)
        apart = [whole.of(x[i : i + 1], y[i : i + 1], (dtype, dtype), weights)[0] for i in range(40)]
        assert np.array_equal(together, np.array(apart), equal_nan=True)
