"""Identification looks at no more rows than it takes, and at all of them where they do not agree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hsprobe.compare.stack import stacks_of
from hsprobe.diagnose import diff
from hsprobe.diagnose.identify import Candidate, Identity, Label, Matrix, matrix, sampled, settled
from hsprobe.diagnose.sides import chunk_lanes, depth_candidates, open_side
from hsprobe.trace.reader import Trace
from tests.synthetic import H, World, write_infer, write_train

WORLD = World(requests=[np.random.default_rng(i).integers(0, 61, 70).tolist() for i in range(20)])
CLEAR = Identity(Label("depth", 3), 1e-6, Label("depth", 4), 0.3, agree=100, rows=100, expected=1e-6)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("sampling")
    train = write_train(folder / "train.h5", world=WORLD, declare=None)
    return train, write_infer(folder / "infer.h5", world=WORLD)


@pytest.fixture(scope="module")
def found(traces: tuple[Path, Path]) -> Iterator[tuple[list, list[Candidate], np.ndarray]]:
    with Trace.open(traces[0]) as train, Trace.open(traces[1]) as infer:
        stack = stacks_of(train, "train")["aux"]
        candidates = depth_candidates(open_side(infer, "infer"))
        yield chunk_lanes(stack, H), candidates, stack.keys.usable


def test_a_few_rows_settle_what_is_plain(found: tuple[list, list[Candidate], np.ndarray]) -> None:
    lanes, candidates, rows = found
    table = sampled(lanes, candidates, rows, 512, lambda table: True)
    assert len(table.rows) < 200
    assert np.isin(table.rows, rows).all()


def test_all_rows_are_taken_for_as_long_as_nothing_is_settled(
    found: tuple[list, list[Candidate], np.ndarray],
) -> None:
    lanes, candidates, rows = found
    seen: list[int] = []

    def never(table: Matrix) -> bool:
        seen.append(len(table.rows))
        return False

    assert len(sampled(lanes, candidates, rows, 512, never).rows) == 512
    assert seen == sorted(seen)
    assert seen[0] < 200


def test_a_sample_has_the_errors_of_its_rows(found: tuple[list, list[Candidate], np.ndarray]) -> None:
    lanes, candidates, rows = found
    whole, some = matrix(lanes, candidates, rows), matrix(lanes, candidates, rows[5:305:3])
    # The scale of the channels comes from the rows looked at.
    assert some.errors == pytest.approx(whole.errors[:, :, 5:305:3], rel=0.2, abs=1e-6, nan_ok=True)


@pytest.mark.parametrize(
    ("agree", "rows", "enough"), [(100, 100, True), (60, 60, False), (96, 100, False), (299, 300, True)]
)
def test_agreement_counts_as_chance_allows(agree: int, rows: int, enough: bool) -> None:
    assert settled(replace(CLEAR, agree=agree, rows=rows)) is enough


def test_a_rival_close_by_is_not_settled() -> None:
    assert settled(CLEAR)
    close = replace(CLEAR, error=0.1, second_error=0.25)
    assert close.clear
    assert not settled(close)
    assert settled(replace(close, second_error=0.5))


def test_the_report_says_how_many_rows_were_enough(traces: tuple[Path, Path]) -> None:
    report = diff(*traces, rows=1200)
    assert report.same
    (note,) = [note for note in report.notes if note.startswith("aux in TRAIN was identified on ")]
    assert "of 1,400 rows, enough to be misled once in 1,000 times" in note
    assert [line.trained for line in report.chunks] == [3, 6, 9]
