"""How a dump of many samples is opened, compared and read: ``python benchmarks/dumps.py [SAMPLES]``.

Writes a dump as SpecForge would, of SAMPLES small files (default 100,000) made from one that torch wrote,
and a capture of a few of its prompts; prints seconds, memory and the ratio of each to the same with a
hundredth of the samples. Figures depend on the machine, ratios hardly do.

Measured with 100,000 samples on two busy cores, against 1,000: 46 MiB to open and 59 MiB to compare, 1.01
to 1.03 times as much; to look at the token ids of every sample, 0.7 ms of CPU each. Opening and comparing
with prompts of the first samples takes no such look.
"""

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

TOKENS, HIDDEN = 24, 16
WANTED = 4
_MARK = 7_000_000_000


def write_dump(folder: Path, samples: int) -> None:
    """Files that differ in their token ids: copies of what torch writes with the ids put in."""
    ids = torch.full((TOKENS,), _MARK)
    state = torch.randn(1, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16()
    pattern = folder / "pattern"
    sample = {"input_ids": ids, "loss_mask": torch.ones(TOKENS, dtype=torch.int64), "hidden_state": state}
    torch.save({**sample, "aux_hidden_state": state.repeat(1, 1, 3)}, pattern)
    whole = bytearray(pattern.read_bytes())
    at = whole.index(np.full(TOKENS, _MARK, np.int64).tobytes())
    pattern.unlink()
    for index in range(samples):
        if index % 2000 == 0:
            group = folder / f"rows_{index}-{index + 2000}"
            group.mkdir()
        whole[at : at + TOKENS * 8] = token_ids(index).tobytes()
        (group / f"data_{index}.ckpt").write_bytes(whole)


def token_ids(index: int) -> np.ndarray:
    """The prompt of one sample: a beginning that all share, then its own."""
    own = np.random.default_rng(index).integers(10, 30_000, TOKENS - 4)
    return np.concatenate([np.array([1, 2, 3, 4]), own]).astype(np.int64)


def write_capture(path: Path, wanted: list[int], *, foreign: bool = False) -> None:
    """A capture of these samples; with `foreign` of prompts whose ends differ, so that all are looked at."""
    from hsprobe.trace.context import context_hashes
    from hsprobe.trace.writer import TraceWriter

    rng = np.random.default_rng(5)
    with TraceWriter(
        path, {"producer": "sglang", "model": {"num_layers": 4, "hidden_size": HIDDEN}}
    ) as writer:
        writer.add_rank(0, {})
        requests = []
        for number, index in enumerate(wanted):
            tokens = token_ids(index)
            tokens = np.concatenate([tokens[:-2], tokens[-2:] + 30_000]) if foreign else tokens
            columns = {
                "id": [number],
                "model": [0],
                "phase": [0],
                "mode": [2],
                "n_rows": [TOKENS],
                "time": [0.0],
            }
            writer.add_passes(0, columns)
            rows = {
                "pass": [number] * TOKENS,
                "request": [number] * TOKENS,
                "position": np.arange(TOKENS),
                "token": tokens,
                "context": np.array(context_hashes(tokens.tolist()), np.uint64),
                "status": [0] * TOKENS,
            }
            first = writer.append_rows(0, rows)
            bits = rng.normal(size=(TOKENS, 3 * HIDDEN)).astype(np.float32)
            index_n = np.arange(first, first + TOKENS)
            writer.append(0, "aux", bits, index_n, site="aux", dtype="float32", chunks=3)
            requests.append(tokens)
        writer.set_requests([str(i) for i in wanted], requests, [TOKENS] * len(wanted))


_CHILD = """
import sys, time
from pathlib import Path
what, dump, capture = sys.argv[1:]
began, cpu = time.perf_counter(), time.process_time()
if what == "open":
    from hsprobe.formats.registry import in_words, open_dump
    print(in_words(open_dump(Path(dump))), file=sys.stderr)
else:
    from hsprobe.diagnose import diff
    report = diff(dump, capture)
    print(report.notes[-1], file=sys.stderr)
used = time.process_time() - cpu
seconds = time.perf_counter() - began
# What getrusage says is the parent's, where that is larger.
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(seconds, used, int(peak.split()[1]) / 1024)
"""


def measure(what: str, dump: Path, capture: Path) -> tuple[float, ...]:
    """(seconds, seconds of CPU, most MiB of memory) of one process that does it."""
    command = [sys.executable, "-c", _CHILD, what, str(dump), str(capture)]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return tuple(map(float, found))


def main(samples: int) -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory(prefix="hsprobe-benchmark-") as name:
        found: dict[int, dict[str, tuple[float, ...]]] = {}
        for count in (samples // 100, samples):
            folder = Path(name) / str(count)
            folder.mkdir()
            began = time.perf_counter()
            write_dump(folder, count)
            print(f"{count:,} samples written in {time.perf_counter() - began:.0f} s")
            near, last, none = (Path(name) / f"{count}-{kind}.h5" for kind in ("near", "last", "none"))
            write_capture(near, list(range(WANTED)))
            write_capture(last, [count - 1 - i for i in range(WANTED)])
            write_capture(none, list(range(WANTED)), foreign=True)
            found[count] = {
                "open": measure("open", folder, near),
                "diff, prompts at the beginning": measure("diff", folder, near),
                "diff, prompts at the end": measure("diff", folder, last),
                "diff, prompts of another template": measure("diff", folder, none),
            }
        few, many = found[samples // 100], found[samples]
        print(f"{'':36}{'seconds':>9}{'of CPU':>8}{'ratio':>7}{'MiB':>6}{'ratio':>7}")
        for what, (seconds, cpu, memory) in many.items():
            before = few[what]
            times = f"{seconds:9.2f}{cpu:8.2f}{cpu / before[1]:7.1f}"
            print(f"{what:36}{times}{memory:6.0f}{memory / before[2]:7.2f}")


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)
