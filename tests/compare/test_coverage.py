"""Why training rows have no partner, and that the figures add up."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsprobe.compare import absence
from hsprobe.compare.align import pair
from hsprobe.compare.coverage import Coverage, cover
from hsprobe.compare.stack import stacks_of
from hsprobe.trace.context import context_hashes
from hsprobe.trace.reader import Trace
from hsprobe.trace.schema import CaptureMode, Phase, RowStatus
from hsprobe.trace.writer import TraceWriter
from tests.synthetic import World, prompts, write_infer, write_train


def _cover(train: Path, infer: Path, name: str = "aux") -> Coverage:
    with Trace.open(train) as t, Trace.open(infer) as i:
        return cover(t, i, stacks_of(t, "train")["aux"], stacks_of(i, "infer")[name])


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


def test_a_request_that_was_never_captured_is_named(tmp_path: Path) -> None:
    requests = prompts()
    infer = write_infer(tmp_path / "i.h5", world=World(requests=requests[1:]))
    found = _cover(write_train(tmp_path / "t.h5"), infer)
    assert found.reasons == {absence.NOT_CAPTURED: len(requests[0])}
    assert (found.matched_requests, found.train_requests) == (3, 4)


def test_token_ids_that_differ_are_located(tmp_path: Path) -> None:
    requests = prompts()
    changed = [list(r) for r in requests]
    changed[2][17] = (changed[2][17] + 1) % 61
    infer = write_infer(tmp_path / "i.h5", world=World(requests=changed))
    found = _cover(write_train(tmp_path / "t.h5"), infer)
    assert found.reasons == {absence.TOKENS_DIFFER: len(requests[2]) - 17}
    (drift,) = found.drifts
    assert (drift.train_request, drift.infer_request, drift.position) == ("t2", "s2", 17)
    assert drift.train_ids[17 - drift.start] == requests[2][17]
    assert drift.infer_ids[17 - drift.start] == changed[2][17]


def test_a_token_put_in_front_is_a_difference_from_the_start(tmp_path: Path) -> None:
    requests = prompts()
    infer = write_infer(tmp_path / "i.h5", world=World(requests=[[60, *requests[0]], *requests[1:]]))
    found = _cover(write_train(tmp_path / "t.h5"), infer)
    assert found.reasons == {absence.TOKENS_DIFFER: len(requests[0])}
    assert found.drifts[0].position == 0


def test_rows_past_the_end_of_what_was_generated_are_called_so(tmp_path: Path) -> None:
    requests = prompts()
    short = [r[: len(r) - 5] for r in requests]
    infer = write_infer(tmp_path / "i.h5", world=World(requests=short))
    found = _cover(write_train(tmp_path / "t.h5"), infer)
    assert found.reasons == {absence.TRUNCATED: 20}
    assert found.drifts == []


def test_the_last_token_of_a_generation_is_the_end_and_not_a_gap(tmp_path: Path) -> None:
    found = _cover(write_train(tmp_path / "t.h5"), write_infer(tmp_path / "i.h5", keep=20))
    assert found.matched == 80
    assert found.reasons == {absence.BEYOND: found.train_rows - 80}


def test_rows_that_were_not_computed_are_missing_and_not_shifted(tmp_path: Path) -> None:
    infer = write_infer(tmp_path / "i.h5", cached=6)
    found = _cover(write_train(tmp_path / "t.h5"), infer)
    assert found.matched == found.train_rows - 4 * 6
    assert found.reasons == {absence.PREFIX_CACHE: 4 * 6}


def test_a_shared_beginning_does_not_make_two_requests_one(tmp_path: Path) -> None:
    system = prompts(1)[0][:12]
    requests = [[*system, *r] for r in prompts(3, seed=5)]
    infer = write_infer(tmp_path / "i.h5", world=World(requests=requests[:2]))
    train = write_train(tmp_path / "t.h5", world=World(requests=requests))
    found = _cover(train, infer)
    assert found.reasons == {absence.NOT_CAPTURED: len(requests[2]) - 12}


def _write_passes(
    path: Path,
    request: list[int],
    passes: list[tuple[Phase, CaptureMode, range]],
    kept: list[int],
    statuses: dict[int, RowStatus] | None = None,
) -> Path:
    """A capture of one request in given passes, of which the rows `kept` were recorded at site aux."""
    positions = [p for _, _, span in passes for p in span]
    contexts = context_hashes(request)
    with TraceWriter(path, {"producer": "sglang"}) as writer:
        writer.add_rank(0, {})
        columns: dict[str, Any] = {
            "id": range(len(passes)),
            "model": [0] * len(passes),
            "phase": [int(phase) for phase, _, _ in passes],
            "mode": [int(mode) for _, mode, _ in passes],
            "n_rows": [len(span) for _, _, span in passes],
            "time": [0.0] * len(passes),
        }
        writer.add_passes(0, {name: np.asarray(list(values)) for name, values in columns.items()})
        number = [n for n, (_, _, span) in enumerate(passes) for _ in span]
        status = [int((statuses or {}).get(p, RowStatus.PLAIN)) for p in positions]
        writer.append_rows(
            0,
            {
                "pass": np.array(number),
                "request": np.zeros(len(positions), np.int64),
                "position": np.array(positions),
                "token": np.array([request[p] for p in positions]),
                "context": np.array([contexts[p] for p in positions], np.uint64),
                "status": np.array(status),
            },
        )
        rows = [positions.index(p) for p in kept]
        data = np.ones((len(rows), 12), np.float32)
        writer.append(0, "aux", data, rows, site="aux", dtype="float32", chunks=3)
        writer.set_requests(["s0"], [request], [len(request)])
    return path


@pytest.mark.parametrize(
    ("passes", "kept", "reason"),
    [
        ([(Phase.PREFILL, CaptureMode.LAST, range(30))], [29], absence.LAST_ONLY),
        ([(Phase.PREFILL, CaptureMode.FULL, range(30))], [29], absence.OTHER_SITE),
        (
            [
                (Phase.PREFILL, CaptureMode.NULL, range(29)),
                (Phase.DECODE, CaptureMode.FULL, range(29, 30)),
            ],
            [29],
            absence.NO_STATES,
        ),
        (
            [
                (Phase.PREFILL, CaptureMode.FULL, range(29)),
                (Phase.PREFILL, CaptureMode.FULL, range(29, 30)),
            ],
            [29],
            absence.CHUNKED,
        ),
        ([(Phase.PREFILL, CaptureMode.FULL, range(29, 30))], [29], absence.PREFIX_CACHE),
    ],
)
def test_each_way_of_losing_rows_has_its_name(
    tmp_path: Path, passes: list[tuple[Phase, CaptureMode, range]], kept: list[int], reason: str
) -> None:
    (request,) = prompts(1)
    infer = _write_passes(tmp_path / "i.h5", request, passes, kept)
    found = _cover(write_train(tmp_path / "t.h5", world=World(requests=[request])), infer)
    assert (found.matched, found.reasons) == (1, {reason: 29})


def test_tokens_seen_only_as_rejected_drafts_are_called_so(tmp_path: Path) -> None:
    (request,) = prompts(1)
    passes = [
        (Phase.PREFILL, CaptureMode.FULL, range(20)),
        (Phase.VERIFY, CaptureMode.FULL, range(20, 24)),
        (Phase.DECODE, CaptureMode.FULL, range(24, 30)),
    ]
    rejected = dict.fromkeys(range(20, 24), RowStatus.REJECTED)
    infer = _write_passes(tmp_path / "i.h5", request, passes, list(range(30)), rejected)
    found = _cover(write_train(tmp_path / "t.h5", world=World(requests=[request])), infer)
    assert (found.matched, found.reasons) == (26, {absence.REJECTED: 4})


def test_rows_of_the_training_trace_are_all_accounted_for(tmp_path: Path) -> None:
    requests = prompts(3)
    again = [*requests, [*requests[0][:12], 60]]
    train = write_train(tmp_path / "t.h5", world=World(requests=again))
    found = _cover(train, write_infer(tmp_path / "i.h5", world=World(requests=requests[1:])))
    with Trace.open(train) as trace:
        assert found.recorded == trace.ranks[0].tensors["aux"].shape[0] == sum(map(len, again))
    assert found.repeats == 12
    assert found.recorded == found.train_rows + found.repeats + sum(found.left_out_train.values())
    assert found.train_rows == found.matched + sum(found.reasons.values())
