"""How long it takes to tell which of 61 depths chunks hold: ``python -m benchmarks.identification``.

TRAIN holds the chunks and does not say which depths they are; INFER holds every depth of 4,096 rows of width
7,168, in bfloat16 (3.6 GB), and the same chunks. Neighbouring depths are as alike as in a large model (cosine
0.98). Measured on all usable cores, from the start to the verdict: identification of the trained
and of the served chunks, and the direct comparison of all rows.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.table import Row, child, show
from benchmarks.traces import LAYERS, REQUEST, H, encoded, labelled
from hsprobe.trace.writer import TraceWriter

DEPTHS = (2, 30, 58)
_ROUNDS = 2

_IDENTIFY = """
import os, sys, time
from pathlib import Path
import hsprobe.report.terminal
from hsprobe.cluster.processes import ProcessEngine
from hsprobe.compare.engine import using
from hsprobe.diagnose import diff
paths = Path(sys.argv[1]), Path(sys.argv[2])
began, cpu = time.perf_counter(), time.process_time()
with ProcessEngine(given=paths) as engine, using(engine):
    report = diff(*paths)
took, used = time.perf_counter() - began, time.process_time() - cpu
found = [line.trained for line in report.chunks]
rows = max(line.rows for line in report.chunks)
if found != [2, 30, 58] or not report.same:
    raise SystemExit(f"identified {found}: {report.findings}")
print(took, used, rows)
"""


def write(folder: Path, rows: int, width: int, dtype: str) -> tuple[Path, Path]:
    """TRAIN with three chunks, INFER with all depths."""
    train, infer = folder / "train.h5", folder / "infer.h5"
    model = {"architecture": "LlamaForCausalLM", "num_layers": LAYERS, "hidden_size": width, "dtype": dtype}
    with (
        TraceWriter(train, {"producer": "unknown", "model": model}) as a,
        TraceWriter(infer, {"producer": "sglang", "model": model, "aux": {"depths": list(DEPTHS)}}) as b,
    ):
        count = rows // REQUEST
        for writer in (a, b):
            labelled(writer, count)
        for request in range(count):
            index = np.arange(request * REQUEST, (request + 1) * REQUEST)
            chunks = []
            rng = np.random.default_rng(request)
            state = rng.normal(size=(REQUEST, width)).astype(np.float32)
            for depth in range(LAYERS + 1):
                bits = encoded(state, dtype)
                b.append(0, f"layer/{depth:03d}", bits, index, site="layer", dtype=dtype, depth=depth)
                if depth in DEPTHS:
                    chunks.append(bits)
                state = state + np.float32(0.2) * rng.standard_normal(state.shape, np.float32)
            aux = np.concatenate(chunks, axis=1)
            a.append(0, "aux", aux, index, site="aux", dtype=dtype, chunks=3)
            b.append(0, "aux", aux, index, site="aux", dtype=dtype, chunks=3, depths=list(DEPTHS))
    return train, infer


def measure(rows: int = 4096, width: int = H) -> Iterator[Row]:
    """The line."""
    with tempfile.TemporaryDirectory(prefix="hsprobe-bench-") as name:
        paths = write(Path(name), rows, width, "bfloat16")
        runs = [child(_IDENTIFY, *map(str, paths)) for _ in range(_ROUNDS)]
    took, used, looked = min(runs)
    yield Row(
        f"identification, L={LAYERS}, K=3, H={width:,}, {rows:,} rows",
        took,
        "s",
        10,
        most=True,
        note=f"{used:.1f} s of CPU of its own process; looked at {looked:.0f} rows of a chunk",
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--width", type=int, default=H)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    show(list(measure(args.rows, args.width)), args.json)


if __name__ == "__main__":
    main()
