"""Traces of many ranks, made from a trace of one.

Shapes: n rows, H channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsprobe.trace.reader import Rank, Trace
from hsprobe.trace.schema import PASS_COLUMNS, ROW_COLUMNS, RowStatus
from hsprobe.trace.tensor import Tensor
from hsprobe.trace.writer import TraceWriter
from tests.synthetic import Floats, H, encode

DEPTHS = (3, 6, 8)
Tensors = dict[str, Floats]
# (rank, ranks, its tensors by name, all rows of each) -> what it holds instead.
Change = Callable[[int, int, Tensors], None]
# (rank, ranks, tensor, pass of each row) -> the rows that a rank holds, in its order; None for all. [n]
Keep = Callable[[int, int, str, NDArray[Any]], NDArray[Any] | None]


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
    without: Sequence[str] = (),
) -> Path:
    """Write a trace of several ranks that hold the same passes.

    Args:
        change: what a rank holds that is not what the one rank of the source does.
        keep: rows of a tensor that a rank holds, None for all.
        coords: the place of a rank; by default tensor parallel alone.
        names: whether a rank holds a tensor. without: sites that no rank keeps.
    """
    with Trace.open(source) as trace, TraceWriter(out, {**trace.provenance, **(provenance or {})}) as writer:
        (one,) = trace.ranks
        requests = trace.requests
        writer.set_requests(
            requests.ids, [requests.tokens(r) for r in range(len(requests))], requests.prompt_len.tolist()
        )
        for rank in range(ranks):
            sizes = {"tp_size": ranks, "attn_tp_size": ranks}
            writer.add_rank(rank, coords(rank) if coords else {"tp": rank, "attn_tp": rank, **sizes})
            writer.add_passes(rank, {name: one.passes[name] for name in PASS_COLUMNS})
            writer.append_rows(rank, {name: one.rows[name] for name in ROW_COLUMNS})
            _tensors(writer, one, rank, ranks, change, keep, names, without)
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
    without: Sequence[str],
) -> None:
    held = {name: t.read() for name, t in one.tensors.items() if names is None or names(rank, name)}
    if change is not None:
        change(rank, ranks, held)
    for name, values in held.items():
        tensor = one.tensors[name]
        if tensor.site in without:
            continue
        index = tensor.row_index
        chosen = keep(rank, ranks, name, one.rows["pass"][index]) if keep else None
        if chosen is not None:
            index, values = index[chosen], values[chosen]
        writer.append(
            rank,
            name,
            encode(values, tensor.dtype),
            index,
            site=tensor.site,
            dtype=tensor.dtype,
            depth=tensor.depth,
            depths=tensor.depths if values.shape[1] == tensor.shape[1] else None,
            chunks=tensor.chunks if values.shape[1] % H else values.shape[1] // H if tensor.chunks else None,
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


def data_parallel(source: Path, out: Path, ranks: int, *, padding: int = 3, taken: int = 0) -> Path:
    """Write a trace of DP attention: every rank has requests of its own, and padding at the end of each pass.

    Args:
        padding: rows of padding a pass.
        taken: rows of tokens, at the end of each pass of several rows on the last rank, whose aux is that of
            padding rows.
    """
    with Trace.open(source) as trace, TraceWriter(out, trace.provenance) as writer:
        (one,) = trace.ranks
        requests = trace.requests
        writer.set_requests(
            requests.ids, [requests.tokens(r) for r in range(len(requests))], requests.prompt_len.tolist()
        )
        for rank in range(ranks):
            writer.add_rank(rank, {"tp": rank, "dp": rank, "tp_size": ranks, "dp_size": ranks})
            index, mark = _padded_rows(writer, one, rank, ranks, padding)
            spoilt = taken if rank == ranks - 1 else 0
            for name, tensor in one.tensors.items():
                _padded(writer, rank, tensor, index, mark, spoilt if name in ("aux", "draft.input") else 0)
            writer.finish_rank(rank)
    return out


def _padded_rows(
    writer: TraceWriter, one: Rank, rank: int, ranks: int, padding: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Write passes and rows; (row of the source, -1 for padding; pass) of each row."""
    mine = np.unique(one.rows["pass"][one.rows["request"] % ranks == rank])
    passes = {name: one.passes[name][mine] for name in PASS_COLUMNS}
    passes["n_rows"] = passes["n_rows"] + padding
    writer.add_passes(rank, passes)
    index, mark = [], []
    for number, at in enumerate(mine):
        rows = np.flatnonzero(one.rows["pass"] == at)
        index.append(np.concatenate([rows, np.full(padding, -1)]))
        mark.append(np.full(len(index[-1]), number))
    every, where = np.concatenate(index), np.concatenate(mark)
    columns = {name: one.rows[name][np.maximum(every, 0)] for name in ROW_COLUMNS}
    columns["pass"] = where
    labels = {"request": -1, "position": -1, "token": -1, "context": 0, "status": int(RowStatus.PADDING)}
    for name, value in labels.items():
        columns[name] = np.where(every < 0, np.array(value, columns[name].dtype), columns[name])
    writer.append_rows(rank, columns)
    return every, where


def _padded(
    writer: TraceWriter,
    rank: int,
    tensor: Tensor,
    index: NDArray[np.int64],
    mark: NDArray[np.int64],
    taken: int,
) -> None:
    held = np.full(int(max(tensor.row_index.max(), index.max())) + 1, -1)
    held[tensor.row_index] = np.arange(len(tensor))
    passes = np.unique(mark[(index >= 0) & (held[np.maximum(index, 0)] >= 0)])
    rows = np.flatnonzero(np.isin(mark, passes))
    held = np.where(held < 0, 0, held)
    values = tensor.read(held[np.maximum(index[rows], 0)])
    for number in passes:
        pads = np.flatnonzero((mark[rows] == number) & (index[rows] < 0))
        values[pads] = _padding_states(tensor, len(pads), int(number))
        real = np.flatnonzero((mark[rows] == number) & (index[rows] >= 0))
        if taken and len(real) > 2 * taken:
            values[real[-taken:]] = values[pads[:taken]]
    attrs = {"depth": tensor.depth, "depths": tensor.depths, "chunks": tensor.chunks}
    bits = encode(values, tensor.dtype)
    writer.append(rank, tensor.name, bits, rows, site=tensor.site, dtype=tensor.dtype, **attrs)


def _padding_states(tensor: Tensor, count: int, number: int) -> Floats:
    """The same in every tensor of a depth. [count, W]"""
    depths = DEPTHS if tensor.chunks else [tensor.depth if isinstance(tensor.depth, int) else 99]
    parts = [np.random.default_rng([number, depth]).normal(size=(count, H)) for depth in depths]
    states: Floats = (3 * np.concatenate(parts, axis=1)).astype(np.float32)
    return states
