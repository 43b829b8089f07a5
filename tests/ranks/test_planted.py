"""Every fault of ranks is named, on any number of ranks, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hsprobe.cli import main
from hsprobe.diagnose import diff
from hsprobe.diagnose.consistency import SelfReport
from hsprobe.diagnose.model import Report
from hsprobe.diagnose.ranks.between import between_ranks
from hsprobe.errors import HsprobeError
from hsprobe.report import markdown
from hsprobe.report.json import document
from hsprobe.report.terminal import text
from tests.ranks.planted import (
    DEPTHS,
    RankCase,
    alternating,
    columns,
    first_request,
    gathered_across_chunks,
    in_blocks,
    last_stage,
    noisy,
    on_last,
    order_of_sums,
    partial,
    partial_in_stream,
    partial_in_verify,
    prompt_tokens,
    some_rows,
    stage,
    stream_from,
    summed,
    tokens,
    without_early_chunks,
)
from tests.ranks.sharded import Tensors, layer

CASES = [
    RankCase("last rank perturbed", "HS701", on_last(lambda k, x, h: noisy(x)), ["{last}", "aux chunk 0"]),
    RankCase("some rows of the last rank", "HS701", on_last(some_rows), ["{last}"]),
    RankCase("last rank's stream", "HS701", stream_from(5, lambda r, n: r == n - 1), ["{last}", "depth 5"]),
    RankCase("MLP not summed", "HS703", partial("mlp"), ["the MLP outputs of layers 2, 5 and 7"]),
    RankCase("attention not summed", "HS703", partial("attention"), ["the attention outputs"]),
    RankCase("neither summed", "HS703", partial("block"), ["the attention and MLP outputs"]),
    RankCase("one chunk not summed", "HS703", partial("mlp", only=1), ["aux chunk 1", "layer 5"]),
    RankCase(
        "MLP not summed in verify", "HS703", partial_in_verify("mlp"), ["layers 2, 5 and 7 in verify"],
        "HS703",
    ),
    RankCase(
        "MLP not summed in the model", "HS703", partial_in_stream("mlp", 5),
        ["the MLP output of layer 4"], "HS701", every=True,
    ),
    RankCase(
        "one low on every rank", "HS101", None, ["every aux chunk is 1 layer too early"], "", made=(2, 5, 7)
    ),
    RankCase(
        "one low on the last rank", "HS101", on_last(lambda k, x, h: h[layer(DEPTHS[k] - 1)]),
        ["{last}: every aux chunk is 1 layer too early"], "HS701",
    ),
    RankCase(
        "one low and not summed", "HS101 HS703", partial("mlp", depths=(2, 5, 7)),
        ["1 layer too early", "the MLP outputs of layers 1, 4 and 6"], "HS703", made=(2, 5, 7),
    ),
    # Every rank holds the same sum, so among themselves nothing shows.
    RankCase("residual on every rank", "HS704", summed("residual"), ["residual"], ""),
    RankCase("MLP on every rank", "HS704", summed("mlp"), ["MLP output", "times"]),
    RankCase("state summed again", "HS704", summed("state")),
    RankCase("half the columns", "HS702", columns(lambda r, n: r), ["of the 64 columns of aux"]),
    RankCase("the other half of the columns", "HS702", columns(lambda r, n: n - 1 - r)),
    RankCase("gathered across chunks", "HS702", gathered_across_chunks, ["wrong order"]),
    RankCase(
        "tokens in blocks", "HS705", says=["a part of the tokens of aux only, in blocks"],
        keep=tokens(in_blocks),
    ),
    RankCase(
        "tokens alternating", "HS705", says=["a part of the tokens of aux only, interleaved"],
        keep=tokens(alternating),
    ),
    RankCase(
        "prompt tokens in blocks", "HS705", says=["a part of the tokens of aux only in prefill, in blocks"],
        keep=prompt_tokens(in_blocks, "aux"),
    ),
    RankCase("layers' prompt tokens alternating", "", keep=prompt_tokens(alternating, "layer", "mid")),
    RankCase("padding for tokens", "HS706", says=["hold the states of padding rows"], padded=2),
    RankCase("data parallel", "", padded=0),
    RankCase("nothing", ""),
    RankCase("order of sums", "", order_of_sums),
]  # fmt: skip

STAGES = [
    RankCase("stages", "", coords=stage, names=last_stage),
    RankCase(
        "a chunk of an earlier stage", "HS707", without_early_chunks, ["feeds the draft, lacks depth 3"],
        coords=stage, names=last_stage,
    ),
]  # fmt: skip


def _codes(report: Report | SelfReport) -> str:
    assert report.same == (not report.findings)
    return " ".join(sorted(finding.code for finding in report.findings))


def _check(report: Report, case: RankCase, ranks: int) -> None:
    assert _codes(report) == case.codes
    titles = " / ".join(finding.title for finding in report.findings)
    for words in case.says:
        assert words.format(last=f"rank {ranks - 1} of {ranks} (tp {ranks - 1})") in titles


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_was_planted_is_named_and_nothing_else(tmp_path: Path, case: RankCase) -> None:
    train, infer = case.write(tmp_path, "bfloat16", 4)
    _check(diff(train, infer), case, 4)
    # Among themselves ranks show the same, as a rule; where not, or cheap to see, it is looked at.
    if case.between is not None or case.name in MANY:
        alone = between_ranks(infer)
        assert _codes(alone) == (case.codes if case.between is None else case.between)


# What costs little, on more ranks.
MANY = (
    "last rank's stream", "MLP not summed", "one low on the last rank", "residual on every rank",
    "the other half of the columns", "gathered across chunks", "tokens alternating", "nothing",
)  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "dtype", "name"),
    [*((16, "bfloat16", name) for name in MANY), *((8, "float32", name) for name in MANY[::3])],
)
def test_any_number_of_ranks_will_do(tmp_path: Path, ranks: int, dtype: str, name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    _check(diff(*case.write(tmp_path, dtype, ranks)), case, ranks)


def test_without_the_stream_within_layers_the_sum_is_found_and_its_term_left_open(tmp_path: Path) -> None:
    case = RankCase("", "HS703", partial("mlp", only=1))
    train, infer = case.write(tmp_path, "float32", 4, without=("mid",))
    (finding,) = diff(train, infer).findings
    assert finding.code == "HS703"
    assert "an output of layer 5" in finding.title
    assert "--sites aux,layer,mid" in " ".join(finding.evidence)


def test_rows_that_ranks_share_out_in_one_phase_are_all_compared(tmp_path: Path) -> None:
    """Those of other phases, which every rank holds, are compared between ranks too."""
    keep = prompt_tokens(in_blocks, "layer", "mid", "aux")
    whole = diff(*RankCase("", "", every=True).write(tmp_path, "float32", 4))
    parts = diff(*RankCase("", "", every=True, keep=keep).write(tmp_path, "float32", 4))
    assert [line.rows for line in parts.layers] == [line.rows for line in whole.layers]
    assert [line.rows for line in parts.chunks] == [line.rows for line in whole.chunks]
    assert "and 18 more in prefill; together they hold all" in " ".join(parts.notes)

    def wrong_in_verify(rank: int, ranks: int, held: Tensors) -> None:
        if rank == 1:
            held["aux"][-4:] = noisy(held["aux"][-4:], 1.0)

    case = RankCase("", "", wrong_in_verify, keep=keep)
    codes = [finding.code for finding in between_ranks(case.write(tmp_path, "float32", 4)[1]).findings]
    assert sorted(codes) == ["HS701", "HS705"]


def test_a_sum_over_one_of_two_groups_is_told_from_none(tmp_path: Path) -> None:
    case = RankCase("", "HS703", partial("mlp", groups=2, only=0))
    (finding,) = diff(*case.write(tmp_path, "float32", 4)).findings
    assert finding.code == "HS703"
    assert "4 ranks hold 2 different parts" in " ".join(finding.evidence)


@pytest.mark.parametrize(
    ("place", "order"),
    [
        (lambda rank, ranks: rank, "in the order of the ranks"),
        (lambda rank, ranks: (rank + 1) % ranks, "in the order 3, 0, 1, 2 of the ranks"),
        (lambda rank, ranks: ranks - 1 - rank, "in the order 3, 2, 1, 0 of the ranks"),
    ],
)
def test_the_order_in_which_shards_join_is_told(
    tmp_path: Path, place: Callable[[int, int], int], order: str
) -> None:
    """Rank r holds the columns `place(r)`, so the rank that holds the first columns comes first."""
    train, infer = RankCase("", "", columns(place)).write(tmp_path, "float32", 4)
    for findings in (diff(train, infer).findings, between_ranks(infer).findings):
        (finding,) = findings
        assert finding.code == "HS702"
        assert f"joined {order} they are the states" in " ".join(finding.evidence)


@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_a_term_summed_over_ranks_is_there_once_for_each(tmp_path: Path, ranks: int) -> None:
    (finding,) = diff(*RankCase("", "", summed("mlp")).write(tmp_path, "float32", ranks)).findings
    assert finding.code == "HS704"
    assert f"The term is there {ranks} times, once for each of {ranks} ranks." in finding.mend.steps


def test_the_requests_whose_rows_differ_are_named(tmp_path: Path) -> None:
    case = RankCase("", "HS701", on_last(first_request))
    (finding,) = between_ranks(case.write(tmp_path, "float32", 2)[1]).findings
    assert finding.code == "HS701"
    assert "request s0 alone" in " ".join(finding.evidence)


def test_one_rank_alone_cannot_be_compared_between_ranks(tmp_path: Path) -> None:
    capture = RankCase("", "").write(tmp_path, "float32", 1)[1]
    with pytest.raises(HsprobeError, match="one rank alone"):
        between_ranks(capture)


def test_the_command_compares_ranks_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train, infer = RankCase("", "").write(tmp_path, "float32", 2)
    assert main(["diff", str(infer), "--between-ranks"]) == 0
    assert "the ranks agree" in capsys.readouterr().out
    assert main(["diff", str(train), str(infer), "--between-ranks"]) == 2
    assert "two traces were given" in capsys.readouterr().err


def test_a_report_shows_ranks_only_where_there_are_several(tmp_path: Path) -> None:
    case = RankCase("", "")
    one, four = (diff(*case.write(tmp_path, "float32", ranks)) for ranks in (1, 4))
    assert "rank" not in text(one)
    assert "4 ranks, equal bit for bit" in text(four)
    assert document(one)["ranks"] is None
    assert [line["rank"] for line in document(four)["ranks"]["lines"]] == [1, 2, 3]


def test_ranks_that_differ_are_a_table(tmp_path: Path) -> None:
    case = RankCase("", "", stream_from(5, lambda rank, ranks: rank == 1))
    report = diff(*case.write(tmp_path, "float32", 4))
    assert "layer/005" in text(report)
    assert "**" in markdown.document(report).split("| rank |")[1]


@pytest.mark.parametrize("case", STAGES, ids=lambda case: case.name)
def test_stages_that_cover_the_model_are_no_fault_and_a_chunk_lost_between_them_is(
    tmp_path: Path, case: RankCase
) -> None:
    _check(diff(*case.write(tmp_path, "bfloat16", 2)), case, 2)
