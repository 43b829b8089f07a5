"""Which rows are compared, and why others are not."""

from pathlib import Path

import numpy as np
import pytest

from hsprobe.compare.align import pair, token_twins
from hsprobe.compare.stack import spread, stacks_of
from hsprobe.trace.reader import Trace
from hsprobe.trace.schema import Phase
from tests.synthetic import World, prompts, write_infer, write_train


def test_every_pair_has_the_same_tokens_before_it(tmp_path: Path) -> None:
    requests = prompts()
    infer = write_infer(tmp_path / "i.h5", world=World(requests=requests[::-1]))
    with Trace.open(write_train(tmp_path / "t.h5")) as t, Trace.open(infer) as i:
        left, right = stacks_of(i, "infer")["aux"], stacks_of(t, "train")["aux"]
        pairs = pair(left, right)
        assert len(pairs) == sum(len(r) for r in requests)
        for a, b in zip(pairs.left, pairs.right, strict=True):
            position = int(left.keys.position[a])
            mine = i.requests.tokens(int(left.keys.request[a]))[: position + 1]
            theirs = t.requests.tokens(int(right.keys.request[b]))[: position + 1]
            assert mine.tolist() == theirs.tolist()


def test_tensors_of_the_same_passes_are_joined_row_by_row(tmp_path: Path) -> None:
    infer = write_infer(tmp_path / "i.h5", world=World(requests=prompts(1) * 2))
    with Trace.open(infer) as i:
        stacks = stacks_of(i, "infer")
        pairs = pair(stacks["aux"], stacks["layer/003"])
        assert pairs.left.tolist() == pairs.right.tolist()


def test_a_sample_gives_every_phase_its_share(tmp_path: Path) -> None:
    with Trace.open(write_infer(tmp_path / "i.h5")) as i:
        keys = stacks_of(i, "infer")["aux"].keys
    rows = spread(keys.usable, keys, 30)
    phases = {Phase(p).name: int((keys.phase[rows] == p).sum()) for p in np.unique(keys.phase)}
    assert phases == {"PREFILL": 10, "DECODE": 10, "VERIFY": 10}
    assert spread(keys.usable, keys, 10**6) is keys.usable


def test_token_twins_share_the_token_and_not_the_context(tmp_path: Path) -> None:
    with Trace.open(write_infer(tmp_path / "i.h5")) as i:
        stack = stacks_of(i, "infer")["aux"]
    pairs = token_twins(stack, stack.keys.usable)
    assert len(pairs) > 50
    assert (stack.keys.token[pairs.left] == stack.keys.token[pairs.right]).all()
    assert (stack.keys.context[pairs.left] != stack.keys.context[pairs.right]).all()


@pytest.mark.parametrize("rows", [[5, 3, 3, 40], [7], [0, 1, 2, 3]])
def test_rows_come_back_in_the_order_asked_for(tmp_path: Path, rows: list[int]) -> None:
    with Trace.open(write_train(tmp_path / "t.h5")) as t:
        stack = stacks_of(t, "train")["aux"]
        whole = stack.read(np.arange(stack.rows))
        assert (stack.read(np.array(rows)) == whole[rows]).all()
