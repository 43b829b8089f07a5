"""Time and memory of `hsprobe diff` by the number of ranks: both may grow no faster than the ranks do.

Run with ``python benchmarks/ranks.py [--width H] [--rows N] [--ranks N,N,N]``. Every number of ranks is
compared in a process of its own, several times, and the least CPU time counts; what is told are ratios within
one run.
Each rank holds the same rows; all agree, which is what a capture of a right server looks like, so every rank
is compared in full. With `--unlike` every rank holds parts of sums instead, which takes further comparisons.

The last two lines fit time = a + b * ranks by least squares, and say how far the measurement of each number
of ranks is from the line, and what exponent a power law would have between the two largest numbers.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hsprobe.trace.context import context_hashes
from hsprobe.trace.schema import CaptureMode, Phase
from hsprobe.trace.writer import TraceWriter

REQUEST = 500
DEPTHS = 7
CHUNKS = (1, 3, 5)
_CHILD = """\
import resource, sys, time
from hsprobe.cli import main
import hsprobe.diagnose, hsprobe.report.terminal
before = time.process_time()
code = main(sys.argv[1:])
used = time.process_time() - before
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(used, peak, file=sys.stderr)
sys.exit(code)
"""


def write(path: Path, rows: int, width: int, ranks: int, *, served: bool, unlike: bool = False) -> None:
    """A trace of `ranks` ranks with the same rows: every depth, and aux chunks where it is `served`."""
    model = {"architecture": "LlamaForCausalLM", "num_layers": DEPTHS - 1, "hidden_size": width}
    provenance = {"producer": "sglang" if served else "transformers", "model": model | {"dtype": "float32"}}
    if served:
        provenance["aux"] = {"depths": list(CHUNKS)}
    tokens = [np.random.default_rng(i).integers(0, 50_000, REQUEST).tolist() for i in range(rows // REQUEST)]
    with TraceWriter(path, provenance) as writer:
        for rank in range(ranks):
            writer.add_rank(rank, {"tp": rank, "tp_size": ranks})
            for request, ids in enumerate(tokens):
                _request(writer, rank, request, ids, width, served=served, parts=ranks if unlike else 1)
            writer.finish_rank(rank)
        writer.set_requests([f"r{i}" for i in range(len(tokens))], tokens, [REQUEST] * len(tokens))


def _request(
    writer: TraceWriter, rank: int, request: int, ids: list[int], width: int, *, served: bool, parts: int
) -> None:
    passes = {"id": [request], "model": [0], "time": [0.0], "phase": [int(Phase.PREFILL)]}
    first = writer.add_passes(rank, passes | {"mode": [int(CaptureMode.FULL)], "n_rows": [REQUEST]})
    columns = {
        "pass": np.full(REQUEST, first),
        "request": np.full(REQUEST, request),
        "position": np.arange(REQUEST),
        "token": np.array(ids),
        "context": np.array(context_hashes(ids), np.uint64),
        "status": np.zeros(REQUEST, np.int64),
    }
    start = writer.append_rows(rank, columns)
    index = np.arange(start, start + REQUEST)
    rng = np.random.default_rng(request)
    states = np.cumsum(rng.normal(size=(DEPTHS, REQUEST, width)), axis=0).astype(np.float32)
    for depth, x in enumerate(states):
        writer.append(rank, f"layer/{depth:03d}", x, index, site="layer", dtype="float32", depth=depth)
    if served:
        chunks = [_part(states[d - 1], states[d], rank, parts) for d in CHUNKS]
        aux = np.concatenate(chunks, axis=1)
        writer.append(rank, "aux", aux, index, site="aux", dtype="float32", chunks=len(CHUNKS))


def _part(before: np.ndarray, state: np.ndarray, rank: int, parts: int) -> np.ndarray:
    """The state, or one rank's part of what the last layer adds to it."""
    if parts == 1:
        return state
    left = [np.random.default_rng(k).normal(size=state.shape).astype(np.float32) for k in range(parts)]
    own: np.ndarray = before + (state - before) / parts + left[rank] - sum(left) / parts
    return own.astype(np.float32)


def measured(arguments: Sequence[str], times: int) -> tuple[float, float]:
    """(least CPU seconds, MiB held at most) of `hsprobe` with these arguments."""
    found = []
    for _ in range(times):
        child = subprocess.run(
            [sys.executable, "-c", _CHILD, *arguments], capture_output=True, text=True, check=False
        )
        if child.returncode not in (0, 1):
            raise SystemExit(child.stdout + child.stderr)
        used, peak = child.stderr.split()[-2:]
        # Linux counts in KiB.
        found.append((float(used), int(peak) / 1024))
    return min(seconds for seconds, _ in found), max(peak for _, peak in found)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--ranks", default="1,2,4,8,16")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--unlike", action="store_true")
    args = parser.parse_args()
    ranks = [int(one) for one in args.ranks.split(",")]
    names = ("ranks", "values, MiB", "CPU s", "to the first", "MiB", "to the first")
    print("  ".join(f"{name:>12}" for name in names), flush=True)
    results: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        train, infer = Path(folder) / "train.h5", Path(folder) / "infer.h5"
        write(train, args.rows, args.width, 1, served=False)
        for count in ranks:
            write(infer, args.rows, args.width, count, served=True, unlike=args.unlike and count > 1)
            seconds, peak = measured(["diff", str(train), str(infer)], args.times)
            results.append((seconds, peak))
            values = count * args.rows * args.width * 4 * (DEPTHS + len(CHUNKS)) / (1 << 20)
            row = (count, values, seconds, seconds / results[0][0], peak, peak / results[0][1])
            print("  ".join(f"{n:>12,.2f}" for n in row), flush=True)
    _fit(ranks, [seconds for seconds, _ in results])


def _fit(ranks: Sequence[int], seconds: Sequence[float]) -> None:
    slope, start = np.polyfit(ranks, seconds, 1)
    off = [abs(start + slope * n - s) / s for n, s in zip(ranks, seconds, strict=True)]
    shown = ", ".join(f"{share:.0%}" for share in off)
    print(f"time = {start:.2f} s + {slope:.3f} s * ranks; off the line by {shown}")
    if len(ranks) > 1:
        power = np.log(seconds[-1] / seconds[-2]) / np.log(ranks[-1] / ranks[-2])
        print(f"from {ranks[-2]} to {ranks[-1]} ranks time grows as ranks to the power {power:.2f}")


if __name__ == "__main__":
    main()
