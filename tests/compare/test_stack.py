"""One name over several ranks is one table."""

from pathlib import Path
from typing import Any

import numpy as np

from hsprobe.compare.stack import stacks_of
from hsprobe.trace.context import context_hashes
from hsprobe.trace.reader import Trace
from hsprobe.trace.writer import TraceWriter


def _write(path: Path, halves: list[list[int]]) -> Path:
    """Two ranks that each recorded another request (data parallel); row values name rank and position."""
    with TraceWriter(path, {"producer": "sglang"}) as writer:
        for rank, tokens in enumerate(halves):
            n = len(tokens)
            writer.add_rank(rank, {"dp": rank})
            columns: dict[str, Any] = {
                "id": [0],
                "model": [0],
                "phase": [0],
                "mode": [2],
                "n_rows": [n],
                "time": [0.0],
            }
            writer.add_passes(rank, columns)
            writer.append_rows(
                rank,
                {
                    "pass": np.zeros(n, np.int64),
                    "request": np.full(n, rank),
                    "position": np.arange(n),
                    "token": np.array(tokens),
                    "context": np.array(context_hashes(tokens), np.uint64),
                    "status": np.zeros(n, np.int64),
                },
            )
            values = (100 * rank + np.arange(n, dtype=np.float32))[:, None] * np.ones((1, 6), np.float32)
            writer.append(rank, "aux", values, np.arange(n), site="aux", dtype="float32", chunks=3)
        writer.set_requests(["a", "b"], halves, [len(h) for h in halves])
    return path


def test_rows_of_all_ranks_are_read_in_the_order_asked_for(tmp_path: Path) -> None:
    with Trace.open(_write(tmp_path / "i.h5", [[5, 6, 7], [8, 9, 10, 11]])) as trace:
        stack = stacks_of(trace, "infer")["aux"]
        assert stack.rows == 7
        assert stack.keys.request.tolist() == [0, 0, 0, 1, 1, 1, 1]
        assert stack.read(np.array([6, 0, 3, 0, 2]))[:, 0].tolist() == [103, 0, 100, 0, 2]
        assert len(np.unique(stack.keys.row)) == 7
