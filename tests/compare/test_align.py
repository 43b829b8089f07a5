"""Which rows are compared, and why others are not."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsprobe.compare import coverage
from hsprobe.compare.align import pair, spread, token_twins
from hsprobe.compare.coverage import Coverage, cover
from hsprobe.compare.stack import stacks_of
from hsprobe.trace.context import context_hashes
from hsprobe.trace.reader import Trace
from hsprobe.trace.schema import Phase, RowStatus
from hsprobe.trace.writer import TraceWriter
from tests.synthetic import World, prompts, write_infer, write_train


def _cover(train: Path, infer: Path, name: str = "aux") -> Coverage:
    with Trace.open(train) as t, Trace.open(infer) as i:
        return cover(t, i, stacks_of(t, "train")["aux"], stacks_of(i, "infer")[name])


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


def test_rejected_rows_are_counted_and_never_compared(tmp_path: Path) -> None:
    infer = write_infer(tmp_path / "i.h5")
    with Trace.open(infer) as i:
        keys = stacks_of(i, "infer")["aux"].keys
        rejected = int(np.count_nonzero(keys.status == RowStatus.REJECTED))
        assert not (keys.status[keys.usable] == RowStatus.REJECTED).any()
    found = _cover(write_train(tmp_path / "t.h5"), infer)
    assert rejected > 0
    assert found.left_out_infer == {"rejected": rejected}
    assert found.matched == found.train_rows


def test_a_context_computed_twice_gives_both_rows_a_partner(tmp_path: Path) -> None:
    requests = prompts(1) * 2
    infer = write_infer(tmp_path / "i.h5", world=World(requests=requests))
    train = write_train(tmp_path / "t.h5", world=World(requests=requests[:1]))
    with Trace.open(train) as t, Trace.open(infer) as i:
        pairs = pair(stacks_of(i, "infer")["aux"], stacks_of(t, "train")["aux"])
    assert len(pairs) == 2 * len(requests[0])
    found = _cover(train, infer)
    assert (found.matched, found.train_rows) == (len(requests[0]), len(requests[0]))


def test_tensors_of_the_same_passes_are_joined_row_by_row(tmp_path: Path) -> None:
    infer = write_infer(tmp_path / "i.h5", world=World(requests=prompts(1) * 2))
    with Trace.open(infer) as i:
        stacks = stacks_of(i, "infer")
        pairs = pair(stacks["aux"], stacks["layer/003"])
        assert pairs.left.tolist() == pairs.right.tolist()


def test_a_request_that_was_never_captured_is_named(tmp_path: Path) -> None:
    requests = prompts()
    infer = write_infer(tmp_path / "i.h5", world=World(requests=requests[1:]))
    found = _cover(write_train(tmp_path / "t.h5"), infer)
    assert found.reasons == {coverage.NOT_CAPTURED: len(requests[0])}
    assert (found.matched_requests, found.train_requests) == (3, 4)


def test_token_ids_that_differ_are_located(tmp_path: Path) -> None:
    requests = prompts()
    changed = [list(r) for r in requests]
    changed[2][17] = (changed[2][17] + 1) % 61
    infer = write_infer(tmp_path / "i.h5", world=World(requests=changed))
    found = _cover(write_train(tmp_path / "t.h5"), infer)
    assert found.reasons == {coverage.TOKENS_DIFFER: len(requests[2]) - 17}
    (drift,) = found.drifts
    assert (drift.train_request, drift.infer_request, drift.position) == ("t2", "s2", 17)
    assert drift.train_ids[17 - drift.start] == requests[2][17]
    assert drift.infer_ids[17 - drift.start] == changed[2][17]


def test_a_token_put_in_front_is_a_difference_from_the_start(tmp_path: Path) -> None:
    requests = prompts()
    infer = write_infer(tmp_path / "i.h5", world=World(requests=[[60, *requests[0]], *requests[1:]]))
    found = _cover(write_train(tmp_path / "t.h5"), infer)
    assert found.reasons == {coverage.TOKENS_DIFFER: len(requests[0])}
    assert found.drifts[0].position == 0


def test_rows_past_the_end_of_what_was_generated_are_called_so(tmp_path: Path) -> None:
    requests = prompts()
    short = [r[: len(r) - 5] for r in requests]
    infer = write_infer(tmp_path / "i.h5", world=World(requests=short))
    found = _cover(write_train(tmp_path / "t.h5"), infer)
    assert found.reasons == {coverage.BEYOND: 20}
    assert found.drifts == []


def test_the_last_token_of_a_generation_is_the_end_and_not_a_gap(tmp_path: Path) -> None:
    found = _cover(write_train(tmp_path / "t.h5"), write_infer(tmp_path / "i.h5", keep=20))
    assert found.matched == 80
    assert found.reasons == {coverage.BEYOND: found.train_rows - 80}


def test_rows_that_were_not_computed_are_missing_and_not_shifted(tmp_path: Path) -> None:
    infer = write_infer(tmp_path / "i.h5", cached=6)
    found = _cover(write_train(tmp_path / "t.h5"), infer)
    assert found.matched == found.train_rows - 4 * 6
    assert found.reasons == {coverage.NOT_COMPUTED: 4 * 6}


def test_rows_recorded_at_another_site_only_are_told_apart(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "i.h5", {}) as writer:
        (request,) = prompts(1)
        writer.add_rank(0, {})
        writer.add_passes(
            0, {"id": [0], "model": [0], "phase": [0], "mode": [1], "n_rows": [30], "time": [0.0]}
        )
        columns: dict[str, Any] = {
            "pass": [0] * 30,
            "request": [0] * 30,
            "position": range(30),
            "token": request,
        }
        columns |= {"context": np.array(context_hashes(request), np.uint64), "status": [0] * 30}
        writer.append_rows(0, {name: np.asarray(values) for name, values in columns.items()})
        last = np.ones((1, 12), np.float32)
        writer.append(0, "aux", last, [29], site="aux", dtype="float32", chunks=3)
        writer.set_requests(["s0"], [request], [30])
    found = _cover(write_train(tmp_path / "t.h5", world=World(requests=prompts(1))), tmp_path / "i.h5")
    assert (found.matched, found.reasons) == (1, {coverage.OTHER_SITE: 29})


def test_a_shared_beginning_does_not_make_two_requests_one(tmp_path: Path) -> None:
    system = prompts(1)[0][:12]
    requests = [[*system, *r] for r in prompts(3, seed=5)]
    infer = write_infer(tmp_path / "i.h5", world=World(requests=requests[:2]))
    train = write_train(tmp_path / "t.h5", world=World(requests=requests))
    found = _cover(train, infer)
    assert found.reasons == {coverage.NOT_CAPTURED: len(requests[2]) - 12}


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
