"""Two traces of the same tokens, one slightly off, and shards of a comparison of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hsprobe.compare.shards import Job, Shard, cut
from hsprobe.compare.tables import Source
from hsprobe.trace.reader import Trace
from hsprobe.trace.writer import TraceWriter


def write(path: Path, rows: int, width: int, noise: float) -> Path:
    """A trace with one tensor, values about 1 and as much noise as asked for."""
    rng = np.random.default_rng(7)
    values = rng.standard_normal((rows, width)).astype(np.float32)
    values += noise * np.random.default_rng(8).standard_normal(values.shape).astype(np.float32)
    labels = np.arange(rows)
    with TraceWriter(path, {"producer": "test"}) as writer:
        writer.add_rank(0, {})
        one_pass = {"id": [0], "model": [0], "phase": [1], "mode": [2], "n_rows": [rows], "time": [0.0]}
        writer.add_passes(0, one_pass)
        columns = {"position": labels, "token": labels, "context": labels + 1}
        none = dict.fromkeys(("pass", "request", "status"), labels * 0)
        writer.append_rows(0, {**columns, **none})
        writer.append(0, "layer/002", values, labels, site="layer", dtype="float32", depth=2)
        writer.set_requests(["a"], [labels.tolist()], [rows])
    return path


def whole(left: Path | str, right: Path | str) -> Shard:
    """All rows of two such traces, as one shard."""
    sources = []
    for path in (left, right):
        with Trace.open(path) as trace:
            tensor = trace.ranks[0].tensors["layer/002"]
            sources.append(Source((tensor.place,)))
            rows, width = tensor.shape
    job = Job((0, width), (0, width), np.ones(width, np.float32), 0.02)
    at = np.arange(rows)
    return Shard(sources[0], sources[1], (job,), at, at, np.zeros(rows, np.uint8))


def shards(left: Path | str, right: Path | str, count: int) -> list[Shard]:
    """The same in about so many shards."""
    all_rows = whole(left, right)
    return list(cut(all_rows, 1, most=len(all_rows.left_rows) // count))
