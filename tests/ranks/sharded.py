"""Traces of many ranks, made from a trace of one.

Shapes: n rows, H channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsprobe.trace.reader import Rank, Trace
from hsprobe.trace.schema import PASS_COLUMNS, ROW_COLUMNS
from hsprobe.trace.writer import TraceWriter
from tests.synthetic import Floats, H, encode

Tensors = dict[str, Floats]
# (rank, ranks, its tensors by name, all rows of each) -> what it holds instead.
Change = Callable[[int, int, Tensors], None]
# The rows that a rank holds of a tensor: a mask or indices over all of them. [n]
Keep = Callable[[int, int, str, int], NDArray[Any] | None]


def shard(
    source: Path,
    out: Path,
    ranks: int,
    change: Change | None = None,
    *,
    keep: Keep | None = None,
    coords: Callable[[int], Mapping[str, int]] | None = None,
    provenance: Mapping[str, Any] | None = None,
    names: Callable[[int, str], bool] | None = None,
) -> Path:
    """Write a trace of several ranks that hold the same passes.

    Args:
        change: what a rank holds that is not what the one rank of the source does.
        keep: rows of a tensor that a rank holds, None for all.
        coords: the place of a rank; by default tensor parallel alone.
        names: whether a rank holds a tensor.
    """
    with Trace.open(source) as trace, TraceWriter(out, {**trace.provenance, **(provenance or {})}) as writer:
        (one,) = trace.ranks
        requests = trace.requests
        writer.set_requests(
            requests.ids, [requests.tokens(r) for r in range(len(requests))], requests.prompt_len.tolist()
        )
        for rank in range(ranks):
            writer.add_rank(rank, coords(rank) if coords else {"tp": rank, "attn_tp": rank})
            writer.add_passes(rank, {name: one.passes[name] for name in PASS_COLUMNS})
            writer.append_rows(rank, {name: one.rows[name] for name in ROW_COLUMNS})
            _tensors(writer, one, rank, ranks, change, keep, names)
            writer.finish_rank(rank)
    return out


def _tensors(
    writer: TraceWriter,
    one: Rank,
    rank: int,
    ranks: int,
    change: Change | None,
    keep: Keep | None,
    names: Callable[[int, str], bool] | None,
) -> None:
    held = {name: t.read() for name, t in one.tensors.items() if names is None or names(rank, name)}
    if change is not None:
        change(rank, ranks, held)
    for name, values in held.items():
        tensor = one.tensors[name]
        index = tensor.row_index
        chosen = keep(rank, ranks, name, len(index)) if keep else None
        if chosen is not None:
            index, values = index[chosen], values[chosen]
        chunks = tensor.chunks if tensor.chunks is None or values.shape[1] % H else None
        writer.append(
            rank,
            name,
            encode(values, tensor.dtype),
            index,
            site=tensor.site,
            dtype=tensor.dtype,
            depth=tensor.depth,
            depths=tensor.depths,
            chunks=tensor.chunks if chunks is None else chunks,
        )


def layer(depth: int) -> str:
    return f"layer/{depth:03d}"


def mid(number: int) -> str:
    return f"mid/{number:03d}"


def parts(term: Floats, ranks: int, seed: int = 0) -> list[Floats]:
    """As many parts as ranks that have nothing in common and add up to a term. Each [n, H]."""
    size = np.sqrt(np.mean(term**2, axis=1, keepdims=True))
    rng = np.random.default_rng(seed)
    noise = [size * rng.normal(size=term.shape).astype(np.float32) for _ in range(ranks)]
    left = sum(noise) / ranks
    return [term / ranks + one - left for one in noise]


def chunk(values: Floats, k: int) -> Floats:
    """A view of chunk k."""
    return values[:, k * H : (k + 1) * H]
