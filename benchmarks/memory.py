"""Peak memory of `hsprobe diff` by the number of rows: it may grow with their labels, not their values.

Run with ``python benchmarks/memory.py [--width H] [--rows N,N,N]``. Every size is compared in a process of
its own; all sizes run in one go, and what counts are the ratios and the bytes a row in the last column. The
labels of a row take 41 bytes in each trace (pass, request, position, token, context, status); sorting
contexts takes a few copies of eight bytes each.

Measured in one run at width 64, with 20,000, 80,000 and 240,000 rows (63, 254 and 762 MiB of values): peaks
of 68, 84 and 132 MiB, about 300 bytes a row; before HDF5's chunk cache was turned off and blocks made
smaller, 150, 227 and 286 MiB.

The states are random, so every chunk is compared with every depth; TRAIN is a whole model's reference.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from hsprobe.trace.context import context_hashes
from hsprobe.trace.schema import CaptureMode, Phase
from hsprobe.trace.writer import TraceWriter

REQUEST = 1000
DEPTHS = 5
CHUNKS = (1, 2, 3)
PHASES = (Phase.PREFILL, Phase.DECODE)


def write(path: Path, rows: int, width: int, *, served: bool) -> None:
    """A trace of requests of 1,000 tokens: every depth, and aux chunks where it is `served`."""
    model = {"architecture": "LlamaForCausalLM", "num_layers": DEPTHS - 1, "hidden_size": width}
    provenance = {"producer": "sglang" if served else "transformers", "model": model | {"dtype": "float32"}}
    if served:
        provenance["aux"] = {"depths": list(CHUNKS)}
    with TraceWriter(path, provenance) as writer:
        writer.add_rank(0, {})
        tokens = [
            np.random.default_rng(i).integers(0, 50_000, REQUEST).tolist() for i in range(rows // REQUEST)
        ]
        for request, ids in enumerate(tokens):
            _request(writer, request, ids, width, served=served)
        writer.set_requests([f"r{i}" for i in range(len(tokens))], tokens, [REQUEST // 2] * len(tokens))


def _request(writer: TraceWriter, request: int, ids: list[int], width: int, *, served: bool) -> None:
    passes = {"id": [2 * request, 2 * request + 1], "model": [0, 0], "time": [0.0, 0.0]}
    passes |= {"phase": [int(p) for p in PHASES], "mode": [int(CaptureMode.FULL)] * 2}
    first = writer.add_passes(0, passes | {"n_rows": [REQUEST // 2] * 2})
    columns = {
        "pass": first + np.repeat([0, 1], REQUEST // 2),
        "request": np.full(REQUEST, request),
        "position": np.arange(REQUEST),
        "token": np.array(ids),
        "context": np.array(context_hashes(ids), np.uint64),
        "status": np.zeros(REQUEST, np.int64),
    }
    start = writer.append_rows(0, columns)
    index = np.arange(start, start + REQUEST)
    rng = np.random.default_rng(request)
    states = [rng.normal(size=(REQUEST, width)).astype(np.float32) for _ in range(DEPTHS)]
    for depth, x in enumerate(states):
        writer.append(0, f"layer/{depth:03d}", x, index, site="layer", dtype="float32", depth=depth)
    if served:
        aux = np.concatenate([states[d] for d in CHUNKS], axis=1)
        writer.append(0, "aux", aux, index, site="aux", dtype="float32", chunks=3, depths=list(CHUNKS))


def peak(arguments: list[str]) -> float:
    """MiB that `hsprobe` with these arguments held at most."""
    child = subprocess.run(
        [
            sys.executable,
            "-c",
            "import resource, sys\nfrom hsprobe.cli import main\ncode = main(sys.argv[1:])\n"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)\nsys.exit(code)",
            *arguments,
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if child.returncode:
        raise SystemExit(child.stdout + child.stderr)
    # Linux counts in KiB.
    return int(child.stderr.split()[-1]) / 1024


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rows", default="20000,80000,240000")
    args = parser.parse_args()
    names = ("rows", "values, MiB", "diff, MiB", "itself, MiB", "bytes a row more")
    print("  ".join(f"{name:>11}" for name in names))
    first: tuple[int, float] | None = None
    for rows in map(int, args.rows.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            train, infer = Path(folder) / "train.h5", Path(folder) / "infer.h5"
            write(train, rows, args.width, served=False)
            write(infer, rows, args.width, served=True)
            values = rows * args.width * 4 * (2 * DEPTHS + len(CHUNKS)) / (1 << 20)
            both = peak(["diff", str(train), str(infer)])
            alone = peak(["diff", str(infer)])
        first = first or (rows, both)
        more = (both - first[1]) * (1 << 20) / max(rows - first[0], 1)
        print("  ".join(f"{n:>11,.0f}" for n in (rows, values, both, alone, more)), flush=True)


if __name__ == "__main__":
    main()
