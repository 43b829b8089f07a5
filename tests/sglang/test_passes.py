"""Plain decoding, chunked prefill and prefix-cache hits on a server without a draft."""

import numpy as np
import pytest
from serving import Configuration
from states import Phase, by_context, names_of, rows_of, worst_relative_error

from hsprobe.trace.reader import Trace


@pytest.fixture(scope="module")
def served(kitchen):
    captured = kitchen.capture(Configuration(ids=None, arguments=("--chunked-prefill-size=16",)))
    assert captured.returncode == 0, captured.stderr
    return captured


def test_decode_and_chunked_prefill_rows_equal_the_reference(kitchen, served):
    for depth in range(9):
        name = f"layer/{depth:03d}"
        expected = by_context(rows_of(kitchen.reference("llama"), name))
        for phase in (Phase.PREFILL, Phase.DECODE):
            error, count = worst_relative_error(rows_of(served.trace, name), expected, phase)
            assert count >= 70, phase
            assert error < 5e-6, (name, phase)


def test_long_prompts_came_in_several_passes(served):
    rows = rows_of(served.trace, "layer/000")
    with Trace.open(served.trace) as trace:
        prefill = trace.ranks[0].passes["phase"] == int(Phase.PREFILL)
        assert trace.ranks[0].passes["n_rows"][prefill].max() <= 16
        longest = max(int(n) for n in trace.requests.prompt_len)
    assert longest > 16
    assert rows.position.max() >= longest


def test_nothing_is_said_of_a_draft(served):
    assert not any(name.startswith("draft") or name == "aux" for name in names_of(served.trace))
    assert np.isfinite(rows_of(served.trace, "logits_processor.input").values_NW).all()
