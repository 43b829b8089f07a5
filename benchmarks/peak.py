"""Most memory that `hsprobe diff` holds, over interpreter and libraries: ``python -m benchmarks.peak``.

What counts is the sum over its processes, of which there is one a usable core, each at the moment when it
holds most.

A pair of 1 GiB, and one of 50 GiB of which the values are holes in a sparse file: they read as zeros and
take no room on the disk. The large one holds bfloat16 in one stretch, the layout that can be had without
writing it.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np

from benchmarks.table import Row, child, show
from benchmarks.traces import DEPTHS, LAYERS, REQUEST, H, K, labelled, rows_of, write_pair
from hsprobe.trace.writer import TraceWriter

_DIFF = """
import subprocess, sys, time
from pathlib import Path
import hsprobe.cli, hsprobe.diagnose, hsprobe.report.terminal
from hsprobe.cluster.processes import ProcessEngine
from hsprobe.compare.engine import using
from hsprobe.diagnose import diff
def peak(pid):
    found = next(line for line in open(f"/proc/{pid}/status") if line.startswith("VmHWM"))
    return int(found.split()[1]) / 1024
idle = "import sys, hsprobe.cluster.worker, hsprobe.cluster.work; print(flush=True); sys.stdin.read()"
with subprocess.Popen([sys.executable, "-c", idle], stdin=-1, stdout=-1) as worker:
    worker.stdout.readline()
    bare = peak(worker.pid)
before, began = peak("self"), time.perf_counter()
with ProcessEngine() as engine, using(engine):
    report = diff(sys.argv[1], sys.argv[2])
    took = time.perf_counter() - began
    workers = [pid for one in Path("/proc/self/task").glob("*/children") for pid in one.read_text().split()]
    more = [peak("self") - before, *(peak(pid) - bare for pid in workers)]
print(sum(more), before + bare * len(workers), took, report.chunks[0].compared, len(more))
"""


def write_sparse(folder: Path, rows: int, width: int = H) -> tuple[Path, Path]:
    """TRAIN and INFER with all labels and no values."""
    paths = folder / "train.h5", folder / "infer.h5"
    model = {"architecture": "LlamaForCausalLM", "num_layers": LAYERS, "hidden_size": width}
    for path, producer in zip(paths, ("specforge", "sglang"), strict=True):
        known = {
            "producer": producer,
            "model": model | {"dtype": "bfloat16"},
            "aux": {"depths": list(DEPTHS)},
        }
        with TraceWriter(path, known) as writer:
            labelled(writer, rows // REQUEST)
        with h5py.File(path, "r+") as file:
            group = file.create_group("ranks/0/tensors/aux")
            _hollow(group, rows, K * width)
            group["row"] = np.arange(rows)
            for name, value in (("site", "aux"), ("dtype", "bfloat16")):
                group.attrs.create(name, np.array(value.encode(), h5py.string_dtype("utf-8", len(value))))
            group.attrs["chunks"], group.attrs["depths"] = K, list(DEPTHS)
    return paths


def _hollow(group: h5py.Group, rows: int, width: int) -> None:
    """A dataset whose bytes are claimed in the file, and never written."""
    layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    layout.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    layout.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    kind, space = h5py.h5t.py_create(np.dtype("<u2")), h5py.h5s.create_simple((rows, width))
    h5py.h5d.create(group.id, b"data", kind, space, layout)


def measure(mib: int = 1024, gib: int = 50, width: int = H) -> Iterator[Row]:
    """Both lines."""
    with tempfile.TemporaryDirectory(prefix="hsprobe-bench-") as name:
        paths = write_pair(Path(name), rows_of(mib << 20, "float32", width), "float32", width)
        yield _row(f"peak memory, pair of {mib / 1024:.3g} GiB", paths)
    if gib:
        with tempfile.TemporaryDirectory(prefix="hsprobe-bench-") as name:
            paths = write_sparse(Path(name), rows_of(gib << 30, "bfloat16", width), width)
            yield _row(f"peak memory, pair of {gib} GiB (sparse)", paths)


def _row(work: str, paths: tuple[Path, Path]) -> Row:
    more, before, took, rows, processes = child(_DIFF, *map(str, paths))
    of = f"over {before:.0f} MiB of interpreter and libraries of {processes:.0f} processes"
    told = f"{of}; {rows:,.0f} rows in {took:.1f} s"
    return Row(work, more, "MiB", 600, most=True, note=told)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--gib", type=int, default=50, help="of the sparse pair, 0 for none")
    parser.add_argument("--width", type=int, default=H)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    show(list(measure(args.mib, args.gib, args.width)), args.json)


if __name__ == "__main__":
    main()
