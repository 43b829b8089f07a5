"""Rows of a tensor are found by context."""

from pathlib import Path

import numpy as np

from hsprobe.trace.context import context_hashes
from hsprobe.trace.index import RowIndex
from hsprobe.trace.reader import Trace
from hsprobe.trace.schema import CaptureMode, Phase, RowStatus


def test_rows_carry_the_labels_of_their_pass_and_token(trace_path: Path) -> None:
    with Trace.open(trace_path) as trace:
        rank = trace.ranks[0]
        index = RowIndex(rank, rank.tensors["aux"])
    assert len(index) == 7
    assert index.phase.tolist() == [Phase.PREFILL] * 5 + [Phase.VERIFY] * 2
    assert index.mode.tolist() == [CaptureMode.FULL] * 7
    assert index.position.tolist() == [0, 1, 2, 0, 1, 3, 2]
    assert index.where(phases=[Phase.VERIFY]).tolist() == [False] * 5 + [True] * 2
    assert index.where(statuses=[RowStatus.PLAIN, RowStatus.ACCEPTED]).tolist() == [True] * 6 + [False]


def test_a_context_finds_its_first_row_and_an_unknown_one_none(trace_path: Path) -> None:
    with Trace.open(trace_path) as trace:
        rank = trace.ranks[0]
        index = RowIndex(rank, rank.tensors["layer/002"])
    contexts = np.array([*context_hashes([11, 12, 13]), 5, 8, 0], np.uint64)
    assert index.find(contexts).tolist() == [0, 1, 2, -1, 6, -1]
    assert index.find(contexts, index.position == 1).tolist() == [-1, 1, -1, -1, -1, -1]
    assert index.find(np.zeros(0, np.uint64)).tolist() == []
