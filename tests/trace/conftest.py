"""A small trace with every kind of thing in it, written anew for each test."""

from pathlib import Path

import numpy as np
import pytest

from hsprobe.trace.context import context_hashes
from hsprobe.trace.schema import CaptureMode, Model, Phase, RowStatus
from hsprobe.trace.writer import TraceWriter

TOKENS = [[11, 12, 13, 14], [11, 12, 99]]
LAYER_TH = np.arange(7 * 4, dtype=np.float32).reshape(7, 4)
AUX_BITS = np.arange(7 * 6, dtype=np.uint16).reshape(7, 6) + 0x3F80


@pytest.fixture
def trace_path(tmp_path: Path) -> Path:
    """A finished trace: two requests, two passes, a layer in float32 and an aux vector in bfloat16."""
    path = tmp_path / "sample.h5"
    with TraceWriter(path, {"producer": "test"}) as writer:
        writer.add_rank(0, {"tp": 1, "attn_tp": 1})
        writer.add_passes(
            0,
            {
                "id": [4, 5],
                "model": [Model.TARGET] * 2,
                "phase": [Phase.PREFILL, Phase.VERIFY],
                "mode": [CaptureMode.FULL] * 2,
                "n_rows": [5, 2],
                "time": [1.5, 2.5],
            },
        )
        writer.append_rows(
            0,
            {
                "pass": [0] * 5 + [1] * 2,
                "request": [0, 0, 0, 1, 1, 0, 1],
                "position": [0, 1, 2, 0, 1, 3, 2],
                "token": [11, 12, 13, 11, 12, 14, 99],
                "context": context_hashes(TOKENS[0])[:3] + context_hashes(TOKENS[1])[:2] + [7, 8],
                "status": [RowStatus.PLAIN] * 5 + [RowStatus.ACCEPTED, RowStatus.REJECTED],
            },
        )
        writer.append(0, "layer/002", LAYER_TH, np.arange(7), site="layer", dtype="float32", depth=2)
        writer.append(
            0, "aux", AUX_BITS[:5], range(5), site="aux", dtype="bfloat16", depths=[2, 4, 6], chunks=3
        )
        writer.append(
            0, "aux", AUX_BITS[5:], [5, 6], site="aux", dtype="bfloat16", depths=[2, 4, 6], chunks=3
        )
        writer.set_requests(["a", "ü"], TOKENS, [3, 2])
        writer.set_gaps([{"rank": 0, "site": "embed", "depth": 0, "pass": None, "reason": "disarmed"}])
    return path
