"""Attention DP, a pipeline, LayerNorm SP and one rank against two: real servers, one for each layout."""

import pytest
import release

from hsprobe.diagnose import diff
from hsprobe.diagnose.ranks.between import between_ranks
from hsprobe.fixtures.faults.gallery import in_order, run_case
from hsprobe.fixtures.faults.kitchen import Kitchen
from hsprobe.fixtures.faults.rank_cases import PADDED, PIPELINES, RIGHT, SEQUENCE_PARALLEL
from hsprobe.trace.reader import Trace
from hsprobe.trace.schema import RowStatus

pytestmark = release.plants_faults

CASES = in_order(
    [*PADDED, *PIPELINES, *SEQUENCE_PARALLEL, *(case for case in RIGHT if case.name.startswith("one_rank"))]
)
LAYERS = 8
BY_NAME = {case.name: case for case in CASES}


@pytest.fixture(scope="module")
def gallery(tmp_path_factory):
    kitchen = Kitchen(tmp_path_factory.mktemp("ranks-layouts"))
    yield kitchen
    kitchen.stop()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_planted_codes_are_named_and_no_others(gallery, case):
    outcome = run_case(gallery, case)
    assert outcome.codes == case.codes, outcome.said
    if not case.codes:
        # Nothing is wrong because all was looked at, not because nothing was.
        coverage = outcome.report.coverage
        # In half precision the two servers' answers part at some token, and with them the contexts.
        least = 0.9 if case.serving.dtype == "float32" else 0.6
        assert coverage.matched >= least * coverage.train_rows
        if case.training.layers is None:
            assert [line.depth for line in outcome.report.layers] == [*range(LAYERS + 1), "final"]


def test_attention_dp_gives_each_rank_requests_of_its_own_and_padding(gallery):
    path = gallery.capture(BY_NAME["nothing/qwen3-float32-dp2"])
    with Trace.open(path) as trace:
        assert trace.gaps == []
        assert [(rank.coords["dp"], rank.coords["attn_tp_size"]) for rank in trace.ranks] == [(0, 1), (1, 1)]
        requests = [set(rank.rows["request"].tolist()) - {-1} for rank in trace.ranks]
        assert requests[0] & requests[1] == set()
        assert requests[0] | requests[1] == set(range(len(trace.requests)))
        padding = [int((rank.rows["status"] == int(RowStatus.PADDING)).sum()) for rank in trace.ranks]
        assert min(padding) > 0


def test_a_pipelines_stages_record_their_own_layers(gallery):
    path = gallery.capture(BY_NAME["layer_of_first_stage/llama-float32-pp2"])
    with Trace.open(path) as trace:
        assert trace.gaps == []
        first, last = trace.ranks
        assert [rank.coords["pp"] for rank in trace.ranks] == [0, 1]
        assert [rank.layers for rank in trace.ranks] == [(0, LAYERS // 2), (LAYERS // 2, LAYERS)]
        depths = [sorted(t.depth for t in rank.tensors.values() if t.site == "layer") for rank in trace.ranks]
        assert depths == [[0, 1, 2, 3], [4, 5, 6, 7, 8]]
        assert "aux" not in first.tensors
        assert last.tensors["aux"].depths == [4, 6]
        assert trace.provenance["aux"] == {"depths": [2, 4, 6]}
        ids = [rank.passes["id"].tolist() for rank in trace.ranks]
        assert ids[0] == ids[1]
    (finding,) = between_ranks(path).findings
    assert "which feeds the draft, lacks depth 2" in finding.title


def test_layernorm_sp_leaves_each_rank_a_slice_of_the_prompts_and_all_of_the_rest(gallery):
    case = BY_NAME["parts_not_gathered/qwen3-float32-sp2"]
    path = gallery.capture(case)
    with Trace.open(path) as trace:
        rows = [rank.tensors["aux"].row_index for rank in trace.ranks]
        phases = [
            rank.passes["phase"][rank.rows["pass"][index]]
            for rank, index in zip(trace.ranks, rows, strict=True)
        ]
        prompts = [set(index[phase == 0].tolist()) for index, phase in zip(rows, phases, strict=True)]
        others = [set(index[phase != 0].tolist()) for index, phase in zip(rows, phases, strict=True)]
        assert prompts[0] & prompts[1] == set()
        assert len(prompts[0] | prompts[1]) == int(
            (trace.ranks[0].passes["phase"][trace.ranks[0].rows["pass"]] == 0).sum()
        )
        assert others[0] == others[1] != set()
    report = diff(gallery.dump(case.serving, case.training), path)
    (finding,) = report.findings
    assert "holds a part of the tokens of aux only in prefill, in blocks" in finding.title
    assert any(
        "layer/000 and" in note and "in prefill; together they hold all" in note for note in report.notes
    )
