"""How fast a pair of traces is compared: ``python -m benchmarks.speed [--mib 1024] [--json FILE]``.

The pair is made in a temporary folder: three chunks of width 7,168, TRAIN a training dump and INFER a capture
of the same prompts, every number with a checksum. Against it stand, on the same values:

- `h5diff -p` of Debian's hdf5-tools on the same files, and on plain copies without checksums;
- reading both files once by h5py's `read_direct` into a reused buffer, of either kind;
- SGLang's own comparator on dumps of some of the passes, by the byte, without its imports. It needs `polars`,
  which SGLang does not bring along.

What hsprobe does is measured in a process of its own: opening both traces, joining their rows, and comparing
every pair, on all usable cores, the start of the workers included ("comparison"); the same in one process
alone; and the whole command `hsprobe diff` from its start to its exit. Of several runs the fastest counts,
and the contenders take turns.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import h5py
import numpy as np

from benchmarks.table import Row, child, seconds, show
from benchmarks.traces import REQUEST, H, K, plain_copy, rows_of, write_pair
from hsprobe.cluster.cores import usable_cores

_ROUNDS = 3
_COMPARATOR_BYTES = 192 << 20

_COMPARE = """
import sys, time
import numpy as np
from pathlib import Path
from hsprobe.cluster.processes import ProcessEngine
from hsprobe.compare.direct import Lane, compare_many
from hsprobe.compare.engine import using
from hsprobe.compare.stack import stacks_of
from hsprobe.trace.reader import Trace
train, infer, width = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
began = time.perf_counter()
with (
    ProcessEngine(int(sys.argv[4]) or None, (train, infer)) as engine,
    using(engine),
    Trace.open(train) as a,
    Trace.open(infer) as b,
):
    trained, served = stacks_of(a, "train")["aux"], stacks_of(b, "infer")["aux"]
    jobs = [(Lane(served, width, k), Lane(trained, width, k), 1e-2) for k in range(3)]
    found = compare_many(jobs)
print(time.perf_counter() - began, found[0].total.rows)
"""

_START = """
import time
from hsprobe.cluster.work import answered
from hsprobe.cluster.worker import Worker
worker, began = Worker(), time.perf_counter()
worker.ask(answered, len, "")
print(time.perf_counter() - began)
worker.end()
"""

_COMPARATOR = """
import argparse, sys, time
began = time.perf_counter()
from sglang.srt.debug_utils.comparator import entrypoint
imports = time.perf_counter() - began
args = entrypoint.parse_args(["--baseline-path", sys.argv[1], "--target-path", sys.argv[2]])
began = time.perf_counter()
entrypoint.run(args)
print()
print(time.perf_counter() - began, imports)
"""


def floor(paths: tuple[Path, Path], name: str) -> None:
    """Read both once through h5py into a reused buffer."""
    for path in paths:
        with h5py.File(path, "r", rdcc_nbytes=0) as file:
            data = file[name]
            step = (
                data.chunks[0] if data.chunks else max(1, (1 << 19) // (data.shape[1] * data.dtype.itemsize))
            )
            buffer = np.empty((step, data.shape[1]), data.dtype)
            for low in range(0, len(data) // step * step, step):
                data.read_direct(buffer, np.s_[low : low + step])


def h5diff(paths: tuple[Path, Path]) -> float | None:
    """Seconds that `h5diff -p` takes to find that the values are as close as they are; None without it."""
    if shutil.which("h5diff") is None:
        return None
    names = [str(path) for path in paths]
    data = "/ranks/0/tensors/aux/data" if "train" in paths[0].name else "/data"
    command = ["h5diff", "-q", "-p", "0.5", *names, data, data]
    return seconds(lambda: subprocess.run(command, check=False, capture_output=True))


def comparator(folder: Path, size: int, dtype: str, width: int) -> tuple[float, float] | None:
    """(seconds a byte, seconds of its imports) of SGLang's comparator, on dumps of about `size` bytes.

    SGLang dumps a tensor a pass; the passes are those of the traces. None without what it needs.
    """
    if find_spec("polars") is None:
        return None
    import torch

    rows = REQUEST // 2
    values_TW = np.random.default_rng(0).normal(size=(rows, K * width)).astype(np.float32)
    total = 0
    for name, noise in (("baseline", 0.0), ("target", 1e-3)):
        (folder / name).mkdir()
        tensor_TW = torch.from_numpy(values_TW * np.float32(1 + noise)).to(getattr(torch, dtype))
        for step in range(1, max(1, size // 2 // tensor_TW.nbytes) + 1):
            total += tensor_TW.nbytes
            file = folder / name / f"step={step}___rank=0___dump_index={step}___name=aux.pt"
            torch.save({"value": tensor_TW, "meta": {"name": "aux", "step": step, "rank": 0}}, file)
    took, imports = child(_COMPARATOR, str(folder / "baseline"), str(folder / "target"))
    return took / total, imports


def command(paths: tuple[Path, Path]) -> float:
    """Seconds of the whole `hsprobe diff`."""
    words = [sys.executable, "-m", "hsprobe", "diff", *map(str, paths)]
    return seconds(lambda: subprocess.run(words, check=False, capture_output=True))


def measure(mib: int = 1024, width: int = H) -> Iterator[Row]:
    """The lines for both types."""
    each: dict[str, float] = {}
    for dtype in ("float32", "bfloat16"):
        with tempfile.TemporaryDirectory(prefix="hsprobe-bench-") as name:
            found = list(_measured(Path(name), mib, dtype, width, each))
        yield from found
    yield Row(
        "bf16 against fp32, by the row",
        each["bfloat16"] / each["float32"],
        "x",
        1.0,
        most=True,
        note=f"{each['bfloat16'] * 1e6:.1f} us a row of {K} x {width} against {each['float32'] * 1e6:.1f}",
    )


def _measured(folder: Path, mib: int, dtype: str, width: int, each: dict[str, float]) -> Iterator[Row]:
    rows = rows_of(mib << 20, dtype, width)
    paths = write_pair(folder, rows, dtype, width)
    plain = folder / "a.h5", folder / "b.h5"
    for path, to in zip(paths, plain, strict=True):
        plain_copy(path, to)
    size = sum(path.stat().st_size for path in paths)
    best: dict[str, float] = {}

    def note(name: str, took: float | None) -> None:
        if took is not None:
            best[name] = min(best.get(name, took), took)

    for _ in range(_ROUNDS):
        for name, workers in (("comparison", 0), ("alone", 1)):
            took, compared = child(_COMPARE, *map(str, paths), str(width), str(workers))
            if compared != rows:
                raise SystemExit(f"{compared:.0f} of {rows} rows were compared")
            note(name, took)
        note("start", child(_START)[0])
        note("floor", seconds(lambda: floor(paths, "ranks/0/tensors/aux/data")))
        note("plain floor", seconds(lambda: floor(plain, "data")))
        note("h5diff", h5diff(paths))
        note("plain h5diff", h5diff(plain))
        note("diff", command(paths))
    mine = best["comparison"]
    each[dtype] = mine / rows
    what = f"2 x {size / 2 / (1 << 20):.0f} MiB {dtype}"
    of = f"{mine:.2f} s"
    yield from _against_hdf5(best, what)
    told = f"{best['alone']:.2f} s / {of} on {usable_cores()} cores; a worker starts in {best['start']:.2f} s"
    yield Row("  one process alone takes", best["alone"] / mine, "x", note=told)
    found = comparator(folder, min(_COMPARATOR_BYTES, size), dtype, width)
    if found is None:
        print("SGLang's comparator needs polars: pip install polars to compare with it.")
        return
    slow, imports = found
    yield Row(
        "  SGLang's comparator takes",
        slow * size / mine,
        "x",
        20,
        note=f"by the byte: {slow * size:.1f} s / {of}; its imports, {imports:.0f} s, are left out",
    )


def _against_hdf5(best: dict[str, float], what: str) -> Iterator[Row]:
    """Against the tools of HDF5, from the best seconds of each."""
    mine = best["comparison"]
    of = f"{mine:.2f} s"
    if "h5diff" in best:
        yield Row(
            f"{what}: h5diff -p takes", best["h5diff"] / mine, "x", 4, note=f"{best['h5diff']:.2f} s / {of}"
        )
        plainly = best["plain h5diff"]
        yield Row("  without checksums, it takes", plainly / mine, "x", note=f"{plainly:.2f} s / {of}")
    else:
        print("h5diff is not installed: install Debian's hdf5-tools to compare with it.")
    yield Row(
        "  of reading through h5py", mine / best["floor"], "x", 2, True, f"{of} / {best['floor']:.2f} s"
    )
    bare = best["plain floor"]
    yield Row("  of reading, without checksums", mine / bare, "x", 2, True, f"{of} / {bare:.2f} s")
    yield Row("  whole command", best["diff"], "s", note=f"{best['diff'] / mine:.1f} times the comparison")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=1024, help="of one trace")
    parser.add_argument("--width", type=int, default=H)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    show(list(measure(args.mib, args.width)), args.json)


if __name__ == "__main__":
    main()
