"""Row errors and their summaries. Shapes: n rows, H channels."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hsprobe.compare.shards import Direct
from hsprobe.compare.statistics import ErrorStats, channel_scale, row_errors

N, H = 400, 64


def _rows(seed: int = 0, n: int = N) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, H)).astype(np.float32)


def _error(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return row_errors(a, b, np.maximum(channel_scale(a), channel_scale(b)))


def test_equal_rows_have_no_error_and_unrelated_rows_one_of_root_two() -> None:
    a = _rows()
    assert not _error(a, a).any()
    assert np.median(_error(a, _rows(1))) == pytest.approx(2**0.5, rel=0.05)


def test_the_error_is_the_relative_difference() -> None:
    a = _rows()
    assert np.median(_error(a, a * (1 + 1e-3 * _rows(1)))) == pytest.approx(1e-3, rel=0.1)
    assert _error(a, 2 * a) == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("n", [1, 2, 7, 400])
def test_the_scale_of_a_channel_is_its_median_magnitude(n: int) -> None:
    a = _rows(n=n) + 3
    assert channel_scale(a) == pytest.approx(np.median(np.abs(a), axis=0))


def test_a_loud_channel_does_not_hide_a_difference() -> None:
    a, b = _rows(), _rows(1)
    a[:, 7] += 1000
    b[:, 7] += 1000
    plain = np.linalg.norm(a - b, axis=1) / np.linalg.norm(a, axis=1)
    assert np.median(plain) < 0.02
    assert np.median(_error(a, b)) > 1


def test_the_rounding_of_a_loud_channel_raises_no_alarm() -> None:
    a = _rows()
    b = a.copy()
    a[:, 7] = 1000
    b[:, 7] = 1001
    assert np.median(_error(a, b)) < 1e-3


def test_a_sink_row_bends_no_other_row() -> None:
    a = _rows()
    b = a * (1 + 1e-3 * _rows(1))
    before = _error(a, b)
    a[0] *= 1000
    b[0] *= -1000
    after = _error(a, b)
    assert after[0] > 1
    assert after[1:] == pytest.approx(before[1:], rel=0.05)


def test_rows_with_nan_or_inf_are_nan_and_only_those() -> None:
    a, b = _rows(), _rows()
    a[3, 5], b[8, 0], a[9, 1] = np.nan, np.inf, -np.inf
    assert np.flatnonzero(np.isnan(_error(a, b))).tolist() == [3, 8, 9]


def test_very_large_finite_rows_are_not_called_nan() -> None:
    a, b = _rows(), _rows()
    a[4] = 3e38
    assert np.isfinite(_error(a, b)).all()
    assert _error(a, b)[4] > 0.9


def test_zero_rows_equal_each_other_and_nothing_else() -> None:
    a, b = _rows(), _rows()
    a[0] = b[0] = 0
    a[1] = 0
    assert _error(a, b)[0] == 0
    assert _error(a, b)[1] == pytest.approx(1.0)


def test_a_silent_channel_weighs_no_more_than_the_floor_allows() -> None:
    a = _rows()
    a[:, 9] = 0
    b = a.copy()
    b[:, 9] = 1e-6
    assert np.median(_error(a, b)) < 1e-4


def test_merging_in_any_order_is_exact() -> None:
    errors = np.abs(_rows()).ravel()[:999] ** 3
    errors[[5, 500]] = np.nan
    at = np.arange(len(errors))
    whole = ErrorStats()
    whole.add(errors, 0.5, at)
    parts = []
    for part in np.array_split(at, 7):
        stats = ErrorStats()
        stats.add(errors[part], 0.5, part)
        parts.append(stats)
    forward, backward = ErrorStats(), ErrorStats()
    for stats in parts:
        forward = forward.merge(stats)
    for stats in reversed(parts):
        backward = stats.merge(backward)
    for merged in (forward, backward):
        assert merged.rows == whole.rows == 999
        assert merged.nonfinite == 2
        assert merged.over_limit == whole.over_limit == np.count_nonzero(errors > 0.5)
        assert (merged.histogram == whole.histogram).all()
        assert (merged.largest, merged.largest_at) == (whole.largest, whole.largest_at)
        assert merged.largest_at == np.nanargmax(errors)


@pytest.mark.parametrize("q", [0.1, 0.5, 0.9])
def test_quantiles_are_within_their_stated_accuracy(q: float) -> None:
    errors = np.exp(np.random.default_rng(2).normal(size=5000) * 2 - 5).astype(np.float32)
    stats = ErrorStats()
    stats.add(errors, 1.0)
    assert stats.quantile(q) == pytest.approx(np.quantile(errors, q), rel=0.04)


def test_no_rows_have_no_median() -> None:
    stats = ErrorStats()
    stats.add(np.array([np.nan], np.float32), 1.0)
    assert np.isnan(stats.median)
    assert stats.finite == 0


_SPLITS = st.lists(st.integers(0, 200), max_size=6)
_ERRORS = hnp.arrays(
    np.float32,
    st.integers(0, 200),
    elements=st.one_of(st.floats(0, 2, width=32), st.sampled_from([0.0, 0.25, np.nan])),
)


def _added(errors: np.ndarray, at: np.ndarray) -> ErrorStats:
    stats = ErrorStats()
    stats.add(errors, 0.25, at)
    return stats


@given(errors=_ERRORS, cuts=_SPLITS, order=st.randoms(use_true_random=False))
def test_any_split_merged_in_any_order_and_grouping_is_the_whole(
    errors: np.ndarray, cuts: list[int], order: random.Random
) -> None:
    at = np.arange(len(errors)) * 3
    whole = _added(errors, at)
    rows = list(range(len(errors)))
    order.shuffle(rows)
    shuffled = np.array(rows, np.int64)
    parts = [_added(errors[part], at[part]) for part in np.split(shuffled, sorted(cuts))]
    while len(parts) > 1:
        order.shuffle(parts)
        parts.append(parts.pop().merge(parts.pop()))
    (merged,) = parts
    finite = errors[np.isfinite(errors)]
    assert (merged.rows, merged.nonfinite) == (len(errors), len(errors) - len(finite))
    assert merged.over_limit == np.count_nonzero(finite > np.float32(0.25))
    assert merged.histogram.sum() == len(finite)
    for name in ("rows", "nonfinite", "over_limit", "largest", "largest_at", "first_over", "first_above"):
        assert getattr(merged, name) == getattr(whole, name), name
    assert (merged.histogram == whole.histogram).all()


@given(errors=_ERRORS)
def test_the_first_rows_over_are_the_lowest(errors: np.ndarray) -> None:
    stats = _added(errors, np.arange(len(errors)))
    over = np.flatnonzero(errors > np.float32(0.25))
    assert stats.first_over == (over[0] if len(over) else -1)
    assert stats.first_above <= stats.first_over or stats.first_over == -1


@given(
    rows=hnp.arrays(np.float32, (12, 8), elements=st.floats(-4, 4, width=32)),
    factor=st.sampled_from([1e-3, 1.0, 1e3]),
    sink=st.integers(0, 11),
    channel=st.integers(0, 7),
)
def test_a_sink_row_or_a_loud_channel_changes_no_other_rows_verdict(
    rows: np.ndarray, factor: float, sink: int, channel: int
) -> None:
    a = rows + np.float32(8)
    b = a * np.float32(1 + 1e-3)
    before = _error(a, b)
    for spoil in (np.s_[sink, :], np.s_[:, channel]):
        loud_a, loud_b = a.copy(), b.copy()
        loud_a[spoil] *= np.float32(factor)
        loud_b[spoil] *= np.float32(factor)
        after = _error(loud_a, loud_b)
        others = np.arange(12) != sink
        assert after[others] == pytest.approx(before[others], rel=0.2)


def test_summaries_of_phases_merge_phase_by_phase() -> None:
    first, second = (
        Direct({0: _added(np.abs(_rows()[0]), np.arange(H))}, 1, 0, 7),
        Direct(
            {0: _added(np.abs(_rows(1)[0]), np.arange(H)), 2: _added(np.abs(_rows(2)[0]), np.arange(H))},
            0,
            2,
            3,
        ),
    )
    merged = first.merge(second)
    assert {phase: stats.rows for phase, stats in merged.by_phase.items()} == {0: 2 * H, 2: H}
    assert (merged.left_nonfinite, merged.right_nonfinite, merged.first_nonfinite) == (1, 2, 3)
    assert merged.total.rows == first.total.rows + second.total.rows
