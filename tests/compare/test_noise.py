"""The noise model against what rounding does to a real forward pass."""

import numpy as np
import pytest

from hsprobe.compare.noise import MEDIAN_ALLOWANCE, ROW_ALLOWANCE, coarsest, expected_error
from hsprobe.compare.statistics import channel_scale, row_errors
from tests.synthetic import L, forward, prompts


@pytest.mark.parametrize("seed", [0, 1])
def test_bfloat16_rounding_stays_within_the_expected_noise(seed: int) -> None:
    exact, rounded = forward(prompts()[3], seed=seed), forward(prompts()[3], "bfloat16", seed=seed)
    for depth in range(1, L + 1):
        errors = row_errors(exact[depth], rounded[depth], channel_scale(exact[depth]))
        expected = expected_error("bfloat16", depth)
        assert np.median(errors) < MEDIAN_ALLOWANCE * expected
        assert errors.max() < ROW_ALLOWANCE * expected
        # A model of noise that is far too wide would hide faults.
        assert np.median(errors) > expected / 10


def test_noise_grows_with_depth_and_with_coarser_types() -> None:
    assert expected_error("float32", 8) == pytest.approx(3 * expected_error("float32", 0))
    sizes = [expected_error(d, 4) for d in ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn")]
    assert sizes == sorted(sizes)
    assert 1e-7 < expected_error("float32", 4) < 1e-5
    assert 1e-3 < expected_error("bfloat16", 4) < 3e-2


def test_the_coarsest_type_decides() -> None:
    assert coarsest("float32", "torch.bfloat16", None) == "bfloat16"
    assert coarsest("float16", "BF16") == "bfloat16"
    assert coarsest(None, "something") == "float32"
