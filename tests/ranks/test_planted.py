"""Every fault of ranks is named, on any number of ranks, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest

from hsprobe.diagnose import diff
from hsprobe.diagnose.model import Report
from tests.ranks.planted import (
    DEPTHS,
    RankCase,
    alternating,
    columns,
    gathered_across_chunks,
    in_blocks,
    last_stage,
    noisy,
    on_last,
    order_of_sums,
    partial,
    partial_in_stream,
    some_rows,
    stage,
    stream_from,
    summed,
    tokens,
    without_early_chunks,
)
from tests.ranks.sharded import layer

CASES = [
    RankCase("last rank perturbed", "HS701", on_last(lambda k, x, h: noisy(x)), ["{last}", "aux chunk 0"]),
    RankCase("some rows of the last rank", "HS701", on_last(some_rows), ["{last}"]),
    RankCase("last rank's stream", "HS701", stream_from(5, lambda r, n: r == n - 1), ["{last}", "depth 5"]),
    RankCase("MLP not summed", "HS703", partial("mlp"), ["the MLP outputs of layers 2, 5 and 7"]),
    RankCase("attention not summed", "HS703", partial("attention"), ["the attention outputs"]),
    RankCase("neither summed", "HS703", partial("block"), ["the attention and MLP outputs"]),
    RankCase("one chunk not summed", "HS703", partial("mlp", only=1), ["aux chunk 1", "layer 5"]),
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
    RankCase("residual on every rank", "HS704", summed("residual"), ["residual"]),
    RankCase("MLP on every rank", "HS704", summed("mlp"), ["MLP output", "times"]),
    RankCase("state summed again", "HS704", summed("state")),
    RankCase("half the columns", "HS702", columns(lambda r, n: r), ["of the 64 columns of aux"]),
    RankCase("the other half of the columns", "HS702", columns(lambda r, n: n - 1 - r)),
    RankCase("gathered across chunks", "HS702", gathered_across_chunks, ["wrong order"]),
    RankCase("tokens in blocks", "HS705", says=["a part of the tokens of aux"], keep=tokens(in_blocks)),
    RankCase("tokens alternating", "HS705", says=["a part of the tokens of aux"], keep=tokens(alternating)),
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


def _codes(report: Report) -> str:
    assert report.same == (not report.findings)
    return " ".join(sorted(finding.code for finding in report.findings))


def _check(report: Report, case: RankCase, ranks: int) -> None:
    assert _codes(report) == case.codes
    titles = " / ".join(finding.title for finding in report.findings)
    for words in case.says:
        assert words.format(last=f"rank {ranks - 1} of {ranks} (tp {ranks - 1})") in titles


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_was_planted_is_named_and_nothing_else(
    tmp_path: Path, case: RankCase, dtype: str, ranks: int
) -> None:
    if case.change is order_of_sums and dtype == "float32":
        pytest.skip("a bfloat16 matter")
    _check(diff(*case.write(tmp_path, dtype, ranks)), case, ranks)


@pytest.mark.parametrize("case", STAGES, ids=lambda case: case.name)
def test_stages_that_cover_the_model_are_no_fault_and_a_chunk_lost_between_them_is(
    tmp_path: Path, case: RankCase
) -> None:
    _check(diff(*case.write(tmp_path, "bfloat16", 2)), case, 2)
