"""Pairs of traces to measure on: what a draft with three aux chunks would be trained on, and be served.

Shapes: n rows, H width of a chunk, K chunks.
"""

from __future__ import annotations

from pathlib import Path

import h5py
import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from hsprobe.trace.schema import ITEM_SIZE, STORAGE, CaptureMode, Phase
from hsprobe.trace.writer import TraceWriter

K, H, LAYERS = 3, 7168, 61
DEPTHS = (2, 30, 58)
REQUEST = 512
_POOL = 96


def rows_of(size: int, dtype: str, width: int = H) -> int:
    """How many rows of aux make about `size` bytes."""
    return max(REQUEST, size // (K * width * ITEM_SIZE[dtype]) // REQUEST * REQUEST)


def write_pair(folder: Path, rows: int, dtype: str, width: int = H) -> tuple[Path, Path]:
    """TRAIN and INFER: the same contexts, values as far apart as two faithful computations may be.

    Values repeat after a few hundred thousand elements, which no reader can make use of, so that writing
    takes no longer than the disk needs.
    """
    rng = np.random.default_rng(0)
    pool = rng.normal(size=(_POOL, K * width)).astype(np.float32)
    noise = 3e-7 if dtype == "float32" else 1e-3
    other = (pool * (1 + noise * rng.normal(size=pool.shape))).astype(np.float32)
    paths = folder / "train.h5", folder / "infer.h5"
    for path, values, producer in zip(paths, (pool, other), ("specforge", "sglang"), strict=True):
        _write(path, rows, encoded(values, dtype), dtype, producer)
    return paths


def encoded(values: NDArray[np.float32], dtype: str) -> NDArray[np.generic]:
    """Values in the storage type of a dtype."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    return values.astype(kind).view(STORAGE[dtype])


def _write(path: Path, rows: int, pool: NDArray[np.generic], dtype: str, producer: str) -> None:
    model = {"architecture": "LlamaForCausalLM", "num_layers": LAYERS, "hidden_size": pool.shape[1] // K}
    provenance = {"producer": producer, "model": model | {"dtype": dtype}, "aux": {"depths": list(DEPTHS)}}
    with TraceWriter(path, provenance) as writer:
        count = rows // REQUEST
        labelled(writer, count)
        block = np.tile(pool, (-(-REQUEST // _POOL) + 1, 1))
        for request in range(count):
            start = request * REQUEST
            part = block[start % _POOL : start % _POOL + REQUEST]
            index = np.arange(start, start + REQUEST)
            writer.append(0, "aux", part, index, site="aux", dtype=dtype, chunks=K, depths=list(DEPTHS))


def labelled(writer: TraceWriter, count: int) -> None:
    """Passes, rows and requests of one rank: half of each request is prefilled, half decoded at once."""
    writer.add_rank(0, {})
    tokens = [np.random.default_rng(i).integers(0, 50_000, REQUEST) for i in range(count)]
    both = np.tile([int(Phase.PREFILL), int(Phase.DECODE)], count)
    passes = {"id": np.arange(2 * count), "model": np.zeros(2 * count), "time": np.zeros(2 * count)}
    mode, each = np.full(2 * count, int(CaptureMode.FULL)), np.full(2 * count, REQUEST // 2)
    writer.add_passes(0, passes | {"phase": both, "mode": mode, "n_rows": each})
    total = count * REQUEST
    writer.append_rows(
        0,
        {
            "pass": np.repeat(np.arange(2 * count), REQUEST // 2),
            "request": np.repeat(np.arange(count), REQUEST),
            "position": np.tile(np.arange(REQUEST), count),
            "token": np.concatenate(tokens),
            "context": _contexts(total),
            "status": np.zeros(total, np.int64),
        },
    )
    writer.set_requests([f"r{i}" for i in range(count)], tokens, [REQUEST // 2] * count)


def _contexts(rows: int) -> NDArray[np.uint64]:
    """Numbers that stand for contexts: as unlike one another as hashes, and at no cost."""
    return (np.arange(1, rows + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)).astype(np.uint64)


def plain_copy(path: Path, to: Path) -> None:
    """The aux values of a trace alone, in one stretch without checksums, as other tools write HDF5."""
    with h5py.File(path, "r", rdcc_nbytes=0) as source, h5py.File(to, "w") as target:
        values = source["ranks/0/tensors/aux/data"]
        copy = target.create_dataset("data", values.shape, values.dtype)
        for low in range(0, len(values), 256):
            copy[low : low + 256] = values[low : low + 256]
