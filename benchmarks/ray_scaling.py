"""Two Ray workers of this machine against one, and against this process, alone and with a local worker.

Then a Ray worker is killed in the middle.

Run with ``python benchmarks/ray_scaling.py [--mib N] [--rounds N]``. One cluster of two workers is started;
one worker is had by giving each task both CPUs, so that both figures come from the same processes and the
same warm files. Rounds alternate, the best of each counts, and what matters is the ratio. Each engine runs
once before it is timed: Ray keeps a worker for the tasks of one kind for a second after the last of them, and
one and two workers are two kinds. Results of all engines have to be the same to the bit.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hsprobe.cluster.continued import encoded
from hsprobe.cluster.processes import ProcessEngine
from hsprobe.cluster.rays import RayEngine
from hsprobe.compare.engine import Engine
from hsprobe.compare.shards import Direct, Job, Shard, cut, run
from hsprobe.compare.tables import Source, Tables
from hsprobe.trace.reader import Trace
from hsprobe.trace.writer import TraceWriter

WIDTH = 7168
BLOCK = 512


def write(path: Path, rows: int, noise: float) -> None:
    """A trace with one float32 tensor."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal((BLOCK, WIDTH)).astype(np.float32)
    values *= 1 + noise * np.random.default_rng(1).standard_normal(values.shape).astype(np.float32)
    labels = np.arange(rows)
    with TraceWriter(path, {"producer": "benchmark"}) as writer:
        writer.add_rank(0, {})
        one_pass = {"id": [0], "model": [0], "phase": [1], "mode": [2], "n_rows": [rows], "time": [0.0]}
        writer.add_passes(0, one_pass)
        none = dict.fromkeys(("pass", "request", "status"), labels * 0)
        writer.append_rows(0, {"position": labels, "token": labels, "context": labels + 1, **none})
        for start in range(0, rows, BLOCK):
            here = labels[start : start + BLOCK]
            part = values[: len(here)]
            writer.append(0, "layer/002", part, here, site="layer", dtype="float32", depth=2)
        writer.set_requests(["a"], [labels.tolist()], [rows])


def shards(paths: list[Path]) -> list[Shard]:
    """The comparison of two such traces."""
    sources = []
    for path in paths:
        with Trace.open(path) as trace:
            tensor = trace.ranks[0].tensors["layer/002"]
            sources.append(Source((tensor.place,)))
    at = np.arange(len(tensor))
    jobs = (Job((0, WIDTH), (0, WIDTH), np.ones(WIDTH, np.float32), 0.02),)
    whole = Shard(sources[0], sources[1], jobs, at, at, np.zeros(len(at), np.uint8))
    return list(cut(whole, 2 * 4 * WIDTH))


class Here:
    """This process, one shard after the other."""

    def run(self, work: list[Shard], tables: Tables) -> Iterator[list[Direct]]:
        """See `Engine`."""
        return (run(shard, tables) for shard in work)


class OneWorker(RayEngine):
    """Tasks that need both CPUs of a cluster of two."""

    def _task(self, function: Any) -> Any:
        return self._ray.remote(num_cpus=2, max_retries=0)(function)


def timed(engine: Engine | Here, work: list[Shard]) -> tuple[float, list[Any]]:
    """(seconds, results)."""
    with Tables() as tables:
        began = time.perf_counter()
        results = [encoded(one) for result in engine.run(work, tables) for one in result]
        return time.perf_counter() - began, results


def pid(_: int) -> int:
    """Of a worker."""
    time.sleep(0.05)
    return os.getpid()


def killed(engine: RayEngine, work: list[Shard]) -> list[Any]:
    """Results of a run in whose middle a worker is killed."""
    victim = next(iter(engine.map(pid, range(4))))
    with Tables() as tables:
        running = engine.run(work, tables)
        results = [next(running) for _ in range(max(1, len(work) // 4))]
        os.kill(victim, signal.SIGKILL)
        results += running
    return [encoded(one) for result in results for one in result]


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=int, default=1024, help="size of each trace (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds (default: %(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hsprobe-bench-") as folder, RayEngine(workers=2) as two:
        paths = [Path(folder) / "a.h5", Path(folder) / "b.h5"]
        for path, noise in zip(paths, (0.0, 0.01), strict=True):
            write(path, args.mib * (1 << 20) // (4 * WIDTH), noise)
        work = shards(paths)
        with OneWorker() as one, ProcessEngine(2, pays=1) as local:
            engines: dict[str, Engine | Here] = {
                "this process": Here(),
                "and a local one": local,
                "1 worker": one,
                "2 workers": two,
            }
            best: dict[str, float] = {}
            expected: list[Any] = []
            for _ in range(args.rounds):
                for name, engine in engines.items():
                    timed(engine, work)
                    seconds, results = timed(engine, work)
                    expected = expected or results
                    assert results == expected, name
                    best[name] = min(seconds, best.get(name, seconds))
        for name, seconds in best.items():
            print(f"{name:16} {seconds:7.2f} s  {2 * args.mib / 1024 / seconds:6.2f} GiB/s")
        print(f"with a local worker: {best['this process'] / best['and a local one']:.2f}x")
        print(
            f"2 workers over 1: {best['1 worker'] / best['2 workers']:.2f}x; {len(work)} shards, same results"
        )
        assert killed(two, work) == expected
        print("a worker killed in the middle: same results")
        print(f"load before and meanwhile: {', '.join(f'{one:.1f}' for one in os.getloadavg())}")


if __name__ == "__main__":
    main()
