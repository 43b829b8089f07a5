"""The same pass of several ranks is found by count and labels; a rank that lags or lies leaves a gap."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from played import Server, assert_tensors_lie_on_their_rows, capture, rows_of

from hsprobe.trace.reader import Trace
from hsprobe.trace.schema import NOT_JOINED, RowStatus

A, B = [5, 6, 7, 8], [5, 9]


def ranks(folder: Path, count: int = 2, **hello: Any) -> list[Server]:
    sizes = {"tp_size": count, "pp_size": 1, "dp_size": 1, "attn_tp_size": count, "world_size": count}
    return [
        Server(folder / f"tp{i}-{i}.spool", rank=i, by_model=True, **(sizes | hello)) for i in range(count)
    ]


def steps(server: Server, *, upto: int = 3, draft: bool = True) -> None:
    """A prefill and two verify passes, each followed by the draft's."""
    runs = [
        ("prefill", {"a": (0, A), "b": (0, B)}, "prefill"),
        ("verify", {"a": (4, [20, 21]), "b": (2, [30, 31])}, "draft_extend"),
        ("verify", {"a": (6, [22, 23]), "b": (4, [32, 33])}, "draft_extend"),
    ]
    for phase, rows, then in runs[:upto]:
        server.run(phase, rows)
        if draft:
            server.run(then, rows, model="draft", tensor="draft.input")


def ids(trace: Trace, rank: int) -> list[tuple[int, int]]:
    passes = trace.ranks[rank].passes
    return list(zip(passes["model"].tolist(), passes["id"].tolist(), strict=True))


def reasons(trace: Trace, rank: int) -> list[str]:
    return [gap["reason"] for gap in trace.gaps if gap["rank"] == rank]


def test_ranks_that_ran_the_same_passes_have_them_under_the_same_ids(tmp_path: Path) -> None:
    both = ranks(tmp_path)
    for server in both:
        server.request("a", A)
        server.request("b", B)
        steps(server)
    trace, _ = capture(*both)
    assert trace.gaps == []
    assert ids(trace, 0) == ids(trace, 1)
    assert len(set(ids(trace, 0))) == 6
    for rank in trace.ranks:
        assert rank.coords["tp_size"] == rank.coords["attn_tp_size"] == 2
        assert_tensors_lie_on_their_rows(rank)
    for column in ("context", "token", "position", "status"):
        assert trace.ranks[0].rows[column].tolist() == trace.ranks[1].rows[column].tolist()


def test_passes_of_the_target_are_joined_though_one_stage_runs_no_draft(tmp_path: Path) -> None:
    pipeline = {"tp_size": 1, "attn_tp_size": 1, "pp_size": 2, "dp_size": 1, "world_size": 2, "tp": 0}
    stages = []
    for pp in (0, 1):
        place = pipeline | {"pp": pp, "first_layer": 4 * pp, "end_layer": 4 * pp + 4}
        stages.append(Server(tmp_path / f"pp{pp}-{pp}.spool", rank=pp, by_model=True, **place))
        steps(stages[-1], draft=pp == 1)
    trace, _ = capture(*stages)
    assert trace.gaps == []
    assert [rank.layers for rank in trace.ranks] == [(0, 4), (4, 8)]
    assert ids(trace, 0) == [one for one in ids(trace, 1) if one[0] == 0]


def test_a_rank_that_lags_has_a_gap_and_no_row_of_another_pass(tmp_path: Path) -> None:
    whole, lagging = ranks(tmp_path)
    steps(whole)
    steps(lagging, upto=1)
    trace, _ = capture(whole, lagging)
    assert reasons(trace, 0) == []
    assert reasons(trace, 1) == [
        "2 passes of the target that rank 0 recorded are missing, the first of them 1",
        "2 passes of the draft that rank 0 recorded are missing, the first of them 1",
    ]
    assert ids(trace, 1) == ids(trace, 0)[:2]
    assert_tensors_lie_on_their_rows(trace.ranks[1])


def test_a_rank_that_began_to_record_later_is_joined_where_it_does(tmp_path: Path) -> None:
    whole, late = ranks(tmp_path)
    steps(whole)
    late.skip(2)
    late.run("verify", {"a": (4, [20, 21]), "b": (2, [30, 31])})
    trace, _ = capture(whole, late)
    assert ids(trace, 1) == [(0, 1)]
    assert "3 passes of the draft that rank 0 recorded are missing, the first of them 0" in reasons(trace, 1)
    verify = ids(trace, 0).index((0, 1))
    mask = trace.ranks[0].rows["pass"] == verify
    assert trace.ranks[0].rows["context"][mask].tolist() != [0] * 4
    assert trace.ranks[0].rows["position"][mask].tolist() == trace.ranks[1].rows["position"].tolist()


@pytest.mark.parametrize(
    ("phase", "rows", "what"),
    [
        ("verify", {"b": (0, B), "a": (0, A)}, "work (verify against prefill)"),
        ("prefill", {"b": (0, B), "a": (0, A)}, "requests or rows"),
        ("prefill", {"a": (0, A[:3]), "b": (0, [5, 9, 9])}, "requests or rows"),
        ("prefill", {"a": (1, A), "b": (0, B)}, "positions"),
        ("prefill", {"a": (0, [5, 6, 7, 9]), "b": (0, B)}, "token ids"),
    ],
)
def test_a_pass_that_contradicts_its_count_is_joined_with_none(
    tmp_path: Path, phase: str, rows: dict[str, tuple[int, list[int]]], what: str
) -> None:
    right, wrong = ranks(tmp_path)
    right.run("prefill", {"a": (0, A), "b": (0, B)})
    wrong.run(phase, rows)
    trace, _ = capture(right, wrong)
    assert trace.ranks[0].passes["id"].tolist() == [0]
    assert trace.ranks[1].passes["id"].tolist() == [NOT_JOINED]
    assert any(
        reason == f"a pass of the target has other {what} than rank 0's: it is joined with none"
        for reason in reasons(trace, 1)
    )


def test_a_rank_that_left_nothing_is_a_gap_unless_it_was_not_asked(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("all", "first", "fifth")]
    found = []
    for folder, asked in zip(folders, (None, [0], [0, 5]), strict=True):
        folder.mkdir()
        (server, *_) = ranks(folder, count=4, ranks=asked)
        steps(server)
        trace, _ = capture(server)
        found.append({gap["rank"]: gap["reason"] for gap in trace.gaps})
    assert found[0] == dict.fromkeys((1, 2, 3), "the rank recorded no pass")
    assert found[1] == {}
    assert found[2] == {5: "the server has 4 ranks, and none of this number"}


def test_replicas_that_serve_other_requests_are_not_held_against_each_other(tmp_path: Path) -> None:
    sizes = {"tp_size": 1, "pp_size": 1, "dp_size": 2, "attn_tp_size": 1, "world_size": 2}
    one, two = (Server(tmp_path / f"dp{i}-{i}.spool", rank=i, **(sizes | {"tp": 0, "dp": i})) for i in (0, 1))
    one.run("prefill", {"a": (0, A)})
    two.run("prefill", {"b": (0, B)})
    two.run("prefill", {"c": (0, B)})
    trace, _ = capture(one, two)
    assert trace.gaps == []


def test_padding_that_sglang_adds_in_the_forward_becomes_rows_of_nobody(tmp_path: Path) -> None:
    server = Server(tmp_path / "rank0.spool")
    number = server.run("prefill", {"a": (0, A)}, tensor=None)
    server.spool.append("padding", {"pass": number, "rows": 2})
    data = np.arange(24, dtype=np.float32).reshape(6, 4)
    server.tensor(number, data)
    server.tensor(number, data[:4], name="aux", site="aux", rows={"first": 0, "count": 4})
    trace, summary = capture(server)
    rank = trace.ranks[0]
    assert trace.gaps == []
    assert summary.rows == 6
    rows = rows_of(rank, number)
    assert rows["status"][4:] == [RowStatus.PADDING] * 2
    assert rows["token"][4:] == rows["position"][4:] == rows["request"][4:] == [-1, -1]
    assert rank.tensors["layer/002"].read().tolist() == data.tolist()
    assert rank.tensors["aux"].row_index.tolist() == [0, 1, 2, 3]


def test_slices_lie_on_the_rows_that_each_rank_held(tmp_path: Path) -> None:
    both = ranks(tmp_path)
    for place, server in enumerate(both):
        number = server.run("prefill", {"a": (0, A)}, tensor=None)
        data = np.array([[number, r, A[r], r] for r in (2 * place, 2 * place + 1)], np.float32)
        server.tensor(number, data, rows={"first": 2 * place, "count": 2}, slice=True)
    trace, _ = capture(*both)
    assert trace.gaps == []
    for place, rank in enumerate(trace.ranks):
        tensor = rank.tensors["layer/002"]
        assert tensor.spread == "attn_tp"
        assert tensor.row_index.tolist() == [2 * place, 2 * place + 1]
        assert_tensors_lie_on_their_rows(rank)
    assert len(trace.ranks[0].rows["pass"]) == 4


@pytest.mark.parametrize("rows", [{"first": 3, "count": 2}, {"first": -1, "count": 2}, {"first": 0}])
def test_rows_outside_a_pass_are_a_gap(tmp_path: Path, rows: dict[str, int]) -> None:
    server = Server(tmp_path / "rank0.spool")
    number = server.run("prefill", {"a": (0, A)})
    server.tensor(number, np.zeros((2, 4), np.float32), name="aux", site="aux", rows=rows)
    trace, _ = capture(server)
    assert "aux" not in trace.ranks[0].tensors
    assert "a tensor record was left out" in reasons(trace, 0)[0]


def test_padding_of_an_unknown_pass_or_without_end_is_a_gap(tmp_path: Path) -> None:
    server = Server(tmp_path / "rank0.spool")
    number = server.run("prefill", {"a": (0, A)})
    server.spool.append("padding", {"pass": 99, "rows": 1})
    server.spool.append("padding", {"pass": number, "rows": 1 << 40})
    trace, _ = capture(server)
    assert len(reasons(trace, 0)) == 2
    assert len(trace.ranks[0].rows["pass"]) == 4
