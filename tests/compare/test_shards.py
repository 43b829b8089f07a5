"""A comparison in shards: any split, any order, any process gives the same."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsprobe.compare.align import Pairs
from hsprobe.compare.direct import Lane, compare_many
from hsprobe.compare.engine import Engine, current, using
from hsprobe.compare.shards import Direct, Limits, Shard, cut, merge, run
from hsprobe.compare.stack import Stack, stacks_of
from hsprobe.compare.tables import Tables
from hsprobe.errors import HsprobeError
from hsprobe.trace.context import context_hashes
from hsprobe.trace.reader import Trace
from hsprobe.trace.schema import CaptureMode, Phase
from hsprobe.trace.writer import TraceWriter
from tests.synthetic import encode

N, H, K = 90, 8, 3
PHASES = (Phase.PREFILL, Phase.DECODE)


def write(path: Path, values: np.ndarray, dtype: str, ranks: int) -> None:
    """Rows in two phases, dealt out to some ranks."""
    tokens = np.random.default_rng(1).integers(0, 99, len(values))
    contexts = np.array(context_hashes(tokens.tolist()), np.uint64)
    with TraceWriter(path, {"producer": "sglang", "model": {"hidden_size": H, "num_layers": 4}}) as writer:
        for rank, part in enumerate(np.array_split(np.arange(len(values)), ranks)):
            writer.add_rank(rank, {"dp": rank, "dp_size": ranks})
            half = len(part) // 2
            columns = {"id": [0, 1], "model": [0, 0], "time": [0.0, 0.0], "phase": [int(p) for p in PHASES]}
            columns |= {"mode": [int(CaptureMode.FULL)] * 2, "n_rows": [half, len(part) - half]}
            writer.add_passes(rank, columns)
            rows = {
                "pass": (np.arange(len(part)) >= half).astype(np.int64),
                "request": np.zeros(len(part), np.int64),
                "position": part,
                "token": tokens[part],
                "context": contexts[part],
                "status": np.zeros(len(part), np.int64),
            }
            writer.append_rows(rank, rows)
            bits = encode(values[part], dtype)
            writer.append(rank, "aux", bits, np.arange(len(part)), site="aux", dtype=dtype, chunks=K)
        writer.set_requests(["r"], [tokens], [len(tokens) // 2])


def _values() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    a = rng.normal(size=(N, K * H)).astype(np.float32)
    b = a * (1 + 1e-3 * rng.normal(size=a.shape)).astype(np.float32)
    b[17, 3], a[40, 9], b[40, 20], b[63] = np.nan, np.inf, np.nan, 7.0
    return a, b


@pytest.fixture(scope="module", params=[("float32", 1), ("bfloat16", 1), ("float32", 3)])
def stacks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Stack]]:
    dtype, ranks = request.param
    folder = tmp_path_factory.mktemp("shards")
    for name, values, count in zip(("left.h5", "right.h5"), _values(), (ranks, 1), strict=True):
        write(folder / name, values, dtype, count)
    with Trace.open(folder / "left.h5") as left, Trace.open(folder / "right.h5") as right:
        yield [stacks_of(left, "infer")["aux"], stacks_of(right, "train")["aux"]]


def _jobs(stacks: list[Stack]) -> list[tuple[Lane, Lane, Limits]]:
    left, right = stacks
    limits = {int(Phase.PREFILL): 1e-3, int(Phase.DECODE): 2e-3}
    return [(Lane(left, H, k), Lane(right, H, k), limits) for k in range(K)]


class Seen:
    """An engine that keeps the shards it was given, whole."""

    def __init__(self) -> None:
        self.shards: list[Shard] = []

    def run(self, shards: Iterable[Shard], tables: Tables) -> Iterator[list[Direct]]:
        for shard in shards:
            self.shards.append(shard)
            yield run(shard, tables)


def _facts(results: list[Direct]) -> list[object]:
    """All that a result holds, exactly."""
    return [
        (
            direct.left_nonfinite,
            direct.right_nonfinite,
            direct.first_nonfinite,
            [
                (phase, {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in vars(stats).items()})
                for phase, stats in sorted(direct.by_phase.items())
            ],
        )
        for direct in results
    ]


def test_the_pairs_that_were_spoilt_are_found(stacks: list[Stack]) -> None:
    results = compare_many(_jobs(stacks))
    assert sum(direct.total.rows for direct in results) == K * N
    assert [direct.total.nonfinite for direct in results] == [1, 1, 1]
    assert [direct.first_nonfinite for direct in results] == [17, 40, 40]
    assert [direct.total.largest_at for direct in results] == [63, 63, 63]


@settings(deadline=None, max_examples=20)
@given(cuts=st.lists(st.integers(0, N), max_size=5), most=st.integers(1, 4000), seed=st.integers(0, 1 << 32))
def test_any_split_in_any_order_is_the_whole(
    stacks: list[Stack], cuts: list[int], most: int, seed: int
) -> None:
    seen, order = Seen(), random.Random(seed)
    with using(seen):
        compare_many(_jobs(stacks))
    kept = np.array(sorted(order.sample(range(N), order.randint(1, N))))
    some = _part(seen.shards[0], kept)
    whole = run(some, Tables())
    bounds = [0, *sorted(cuts), N]
    parts = [
        part
        for low, high in pairwise(bounds)
        for part in cut(_part(some, np.s_[low:high]), row_bytes=8 * K * H, most=most)
    ]
    order.shuffle(parts)
    with Tables() as tables:
        results = [run(part, tables) for part in parts]
    while len(results) > 1:
        order.shuffle(results)
        results.append(merge(results.pop(), results.pop()))
    assert _facts(results[0]) == _facts(whole)


def _part(shard: Shard, rows: slice | np.ndarray) -> Shard:
    return replace(
        shard, left_rows=shard.left_rows[rows], right_rows=shard.right_rows[rows], phases=shard.phases[rows]
    )


def test_a_shard_survives_pickling_and_is_read_from_its_files(stacks: list[Stack]) -> None:
    seen = Seen()
    with using(seen):
        whole = compare_many(_jobs(stacks))
    (shard,) = seen.shards
    assert shard.portable
    again = pickle.loads(pickle.dumps(shard))
    with Tables() as tables:
        assert _facts(run(again, tables)) == _facts(whole)


def test_a_shard_whose_file_is_gone_says_so(stacks: list[Stack], tmp_path: Path) -> None:
    seen = Seen()
    with using(seen):
        compare_many(_jobs(stacks))
    (shard,) = seen.shards
    source = shard.left
    places = tuple(replace(place, file=str(tmp_path / "none.h5")) for place in source.places)
    with Tables() as tables, pytest.raises(HsprobeError, match=r"There is no file .*none\.h5"):
        run(replace(shard, left=replace(source, places=places)), tables)


def test_the_engine_is_put_back(stacks: list[Stack]) -> None:
    before: Engine = current()
    with using(Seen()) as _, pytest.raises(ZeroDivisionError):
        raise ZeroDivisionError
    assert current() is before


def test_no_pairs_are_no_work(stacks: list[Stack]) -> None:
    seen, none = Seen(), np.zeros(0, np.int64)
    with using(seen):
        assert compare_many(_jobs(stacks), Pairs(none, none)) == [Direct() for _ in range(K)]
    assert not seen.shards
