"""How time grows: with rows, and with the files of a dump: ``python -m benchmarks.growth [--mib 1024]``.

Rows: pairs of traces of four sizes, an eighth of the largest to all of it. A line is fitted to the CPU
time of comparing all rows by least squares; what counts is how far the worst size is from the line.
Files: the CPU time of `hsprobe diff` against a dump of 100,000 samples, over that with 1,000, when the
capture's prompts are among the first; where they are not, the token ids of every sample have to be looked
at, and `dumps.py` says what that costs.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.dumps import WANTED, write_capture, write_dump
from benchmarks.dumps import measure as measure_dump
from benchmarks.table import Row, child, show
from benchmarks.traces import REQUEST, H, rows_of, write_pair

_ROUNDS = 3
_COMPARE = """
import sys, time
from pathlib import Path
from hsprobe.compare.direct import Lane, compare_many
from hsprobe.compare.stack import stacks_of
from hsprobe.trace.reader import Trace
width = int(sys.argv[3])
best = 1e9
with Trace.open(Path(sys.argv[1])) as a, Trace.open(Path(sys.argv[2])) as b:
    trained, served = stacks_of(a, "train")["aux"], stacks_of(b, "infer")["aux"]
    jobs = [(Lane(served, width, k), Lane(trained, width, k), 1e-2) for k in range(3)]
    for _ in range(3):
        began = time.process_time()
        compare_many(jobs)
        best = min(best, time.process_time() - began)
print(best)
"""


def by_rows(mib: int, width: int = H) -> Iterator[Row]:
    """The line for rows."""
    sizes, took = [], []
    for share in (8, 4, 2, 1):
        rows = max(REQUEST, rows_of(mib << 20, "float32", width) // share // REQUEST * REQUEST)
        with tempfile.TemporaryDirectory(prefix="hsprobe-bench-") as name:
            paths = write_pair(Path(name), rows, "float32", width)
            sizes.append(rows)
            took.append(child(_COMPARE, *map(str, paths), str(width))[0])
    line = np.polyfit(sizes, took, 1)
    off = float(np.max(np.abs(np.polyval(line, sizes) / took - 1)))
    power = float(np.log(took[-1] / took[0]) / np.log(sizes[-1] / sizes[0])) if sizes[-1] > sizes[0] else 1.0
    told = ", ".join(f"{n:,}: {t:.2f} s" for n, t in zip(sizes, took, strict=True))
    yield Row("growth with rows, off the line", 100 * off, "%", 20, most=True, note=told)
    yield Row("  exponent, smallest to largest", power, "", 1.1, most=True)


def by_files(samples: int) -> Iterator[Row]:
    """The line for files."""
    used = []
    for count in (max(WANTED, samples // 100), samples):
        with tempfile.TemporaryDirectory(prefix="hsprobe-bench-") as name:
            folder, capture = Path(name) / "dump", Path(name) / "near.h5"
            folder.mkdir()
            write_dump(folder, count)
            write_capture(capture, list(range(WANTED)))
            used.append(min(measure_dump("diff", folder, capture)[1] for _ in range(_ROUNDS)))
    yield Row(
        f"diff against {samples:,} files, over {samples // 100:,}",
        used[1] / used[0],
        "x",
        1.1,
        most=True,
        note=f"{used[1]:.2f} s of CPU / {used[0]:.2f} s",
    )


def measure(mib: int = 1024, width: int = H, samples: int = 100_000) -> Iterator[Row]:
    """All lines."""
    yield from by_rows(mib, width)
    yield from by_files(samples)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=1024, help="of one trace of the largest pair")
    parser.add_argument("--width", type=int, default=H)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    show(list(measure(args.mib, args.width, args.samples)), args.json)


if __name__ == "__main__":
    main()
