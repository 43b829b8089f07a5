"""Noise is measured on what ranks hold together: replicas once, parts put together, no rank that differs."""

from __future__ import annotations

from pathlib import Path

import pytest

from hsprobe.compare.tolerance import Figure
from hsprobe.diagnose.learn import learn
from hsprobe.errors import HsprobeError
from tests.ranks.planted import (
    SITES,
    Change,
    Keep,
    alternating,
    columns,
    noisy,
    on_last,
    order_of_sums,
    tokens,
)
from tests.ranks.sharded import DEPTHS, shard
from tests.synthetic import L, World, write_infer, write_train


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A whole model's reference and a capture of one rank that differs by 1e-3 a value."""
    folder = tmp_path_factory.mktemp("learned")
    reference = write_train(folder / "reference.h5", every=True)
    return reference, write_infer(folder / "one.h5", DEPTHS, sites=SITES, jitter=1e-3)


def _figures(
    pair: tuple[Path, Path],
    out: Path,
    change: Change | None = None,
    keep: Keep | None = None,
    *,
    aux_alone: bool = False,
) -> tuple[list[Figure], list[Figure]]:
    """What is learned of the one rank, and of four made from it."""
    without = ("layer", "mid", "draft.input") if aux_alone else ()
    one = shard(pair[1], out / "one.h5", 1, without=without)
    four = shard(pair[1], out / "four.h5", 4, change, keep=keep, without=without)
    return learn(pair[0], one).tolerance.figures, learn(pair[0], four).tolerance.figures


def test_replicas_are_measured_once(pair: tuple[Path, Path], tmp_path: Path) -> None:
    alone, four = _figures(pair, tmp_path)
    assert four == alone
    assert {figure.depth for figure in four} >= {*range(L + 1)}


def test_columns_that_ranks_share_out_are_joined(pair: tuple[Path, Path], tmp_path: Path) -> None:
    alone, four = _figures(pair, tmp_path, columns(lambda rank, ranks: rank), aux_alone=True)
    assert four == alone
    assert {figure.depth for figure in four} >= set(DEPTHS)


def test_rows_that_ranks_share_out_are_put_together(pair: tuple[Path, Path], tmp_path: Path) -> None:
    alone, four = _figures(pair, tmp_path, keep=tokens(alternating), aux_alone=True)
    for mine, whole in zip(four, alone, strict=True):
        assert (mine.depth, mine.phase, mine.rows) == (whole.depth, whole.phase, whole.rows)
        assert mine.median == pytest.approx(whole.median, rel=1e-6)


def test_a_rank_that_differs_is_named_and_nothing_is_learned(pair: tuple[Path, Path], tmp_path: Path) -> None:
    wrong = shard(pair[1], tmp_path / "wrong.h5", 4, on_last(lambda k, x, held: noisy(x)))
    with pytest.raises(HsprobeError, match=r"rank 3 of 4 \(tp 3\) does not hold at aux chunk 0") as refused:
        learn(pair[0], wrong)
    assert "--between-ranks" in str(refused.value)


def test_the_order_of_sums_does_not_keep_ranks_from_being_measured(tmp_path: Path) -> None:
    world = World(dtype="bfloat16")
    reference = write_train(tmp_path / "t.h5", every=True, world=world)
    one = write_infer(tmp_path / "one.h5", DEPTHS, world=world, sites=SITES)
    four = shard(one, tmp_path / "four.h5", 4, order_of_sums)
    alone, rows = (
        [(figure.depth, figure.phase, figure.rows) for figure in learn(reference, path).tolerance.figures]
        for path in (one, four)
    )
    assert rows == alone
