"""Wrong wirings are named, with the ids that mend them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hsprobe.diagnose import Report, State, diff
from hsprobe.formats.sglang_ids import depths_of
from hsprobe.trace.schema import Phase
from tests.synthetic import Floats, L, World, write_infer, write_train

WORLDS = {
    "plain": World(),
    "bf16": World(dtype="bfloat16"),
    "loud channel": World(loud=True),
    "sink row": World(sink=True),
    "bf16, loud, sink": World(dtype="bfloat16", loud=True, sink=True),
    "neighbours alike": World(shrink=0.05),
    "bf16, neighbours alike": World(dtype="bfloat16", shrink=0.2),
}
Make = Callable[..., Path]


@pytest.fixture(params=list(WORLDS))
def world(request: pytest.FixtureRequest) -> World:
    return WORLDS[request.param]


def _only(report: Report, code: str) -> str:
    """The title of the one finding, which must be of this class."""
    assert [finding.code for finding in report.findings] == [code], [f.title for f in report.findings]
    assert not report.same
    return report.findings[0].title


def _ids(report: Report) -> str | None:
    return report.findings[0].mend.change


def test_the_right_wiring_is_an_all_clear(tmp_path: Path, world: World) -> None:
    report = diff(
        write_train(tmp_path / "t.h5", (3, 6, 8), world=world),
        write_infer(tmp_path / "i.h5", (3, 6, 8), world=world),
    )
    assert report.same
    assert report.findings == []
    assert [line.served for line in report.chunks] == [3, 6, 8]
    assert all(line.agree == line.rows > 100 for line in report.chunks)
    assert all(line.error < 3 * line.noise for line in report.chunks)


def test_the_embedding_in_a_chunk(tmp_path: Path, world: World) -> None:
    train = write_train(tmp_path / "t.h5", (3, 6, 8), world=world)
    report = diff(train, write_infer(tmp_path / "i.h5", (0, 3, 6), world=world))
    assert _only(report, "HS102") == (
        "aux chunk 0 carries the embedding output (depth 0); "
        "the draft was trained on depth 3 (output of layer 2)"
    )
    assert _ids(report) == "eagle_aux_hidden_state_layer_ids: [-1, 2, 5]  ->  [2, 5, 7]"
    assert "aux chunk 1 carries depth 3 (output of layer 2)" in report.findings[0].evidence[0]
    assert report.findings[0].confidence > 0.9
    assert report.findings[0].agree == report.findings[0].rows == 162


@pytest.mark.parametrize(
    ("offset", "words"), [(-1, "1 layer too early"), (1, "1 layer too late"), (-2, "2 layers too early")]
)
def test_all_chunks_off_by_a_constant(tmp_path: Path, world: World, offset: int, words: str) -> None:
    train = write_train(tmp_path / "t.h5", (3, 5, 7), world=world)
    served = tuple(d + offset for d in (3, 5, 7))
    report = diff(train, write_infer(tmp_path / "i.h5", served, world=world))
    assert words in _only(report, "HS101")
    assert [line.served for line in report.chunks] == list(served)
    old = [d - 1 for d in served]
    assert _ids(report) == f"eagle_aux_hidden_state_layer_ids: {old}  ->  [2, 4, 6]"


def test_one_chunk_wrong(tmp_path: Path, world: World) -> None:
    train = write_train(tmp_path / "t.h5", (3, 6, 8), world=world)
    report = diff(train, write_infer(tmp_path / "i.h5", (3, 5, 8), world=world))
    title = _only(report, "HS102")
    assert title.startswith("aux chunk 1 carries depth 5 (output of layer 4)")
    assert report.findings[0].chunks == [1]
    assert report.findings[0].evidence == ["chunks 0 and 2 as trained"]
    assert _ids(report) == "eagle_aux_hidden_state_layer_ids: [2, 4, 7]  ->  [2, 5, 7]"


@pytest.mark.parametrize(
    "declare", [True, (3, 6, 8), None], ids=["declared so", "declared wrongly", "undeclared"]
)
def test_two_chunks_swapped_in_the_training_dump(tmp_path: Path, world: World, declare: object) -> None:
    train = write_train(tmp_path / "t.h5", (6, 3, 8), world=world, declare=declare)  # type: ignore[arg-type]
    report = diff(train, write_infer(tmp_path / "i.h5", (3, 6, 8), world=world))
    assert _only(report, "HS104").endswith("trained on depths 6, 3, 8, served 3, 6, 8")
    assert _ids(report) == "order of the training chunks: [0, 1, 2]  ->  [1, 0, 2]"
    assert any("no ids mend this" in step for step in report.findings[0].mend.steps)
    told = [e for e in report.findings[0].evidence if "the dump declares its chunk 0" in e]
    assert bool(told) == (declare == (3, 6, 8))


def test_the_order_given_for_fc_weight_makes_the_draft_right(tmp_path: Path) -> None:
    trained = (8, 3, 6)
    report = diff(write_train(tmp_path / "t.h5", trained), write_infer(tmp_path / "i.h5", (3, 6, 8)))
    assert report.findings[0].code == "HS104"
    change = report.findings[0].mend.change
    assert change is not None
    order = [int(k) for k in change.split("->")[1].strip(" []").split(",")]
    rng = np.random.default_rng(0)
    blocks = rng.normal(size=(3, 4))
    states = {depth: rng.normal(size=4) for depth in trained}
    as_trained = sum(blocks[k] @ states[depth] for k, depth in enumerate(trained))
    as_served = sum(blocks[order[k]] @ states[depth] for k, depth in enumerate(sorted(trained)))
    assert as_served == pytest.approx(as_trained)


def test_deepseek_ids_meant_as_outputs_are_read_one_too_low(tmp_path: Path) -> None:
    train = write_train(tmp_path / "t.h5", (3, 6, 8))
    served = depths_of("DeepseekV3ForCausalLM", [2, 5, 7], L, "0.5.23")
    infer = write_infer(tmp_path / "i.h5", served, ids=[2, 5, 7], architecture="DeepseekV3ForCausalLM")
    report = diff(train, infer)
    assert "1 layer too early" in _only(report, "HS101")
    assert _ids(report) == "eagle_aux_hidden_state_layer_ids: [2, 5, 7]  ->  [3, 6, 8]"
    rule = " ".join(report.findings[0].mend.steps)
    assert "a first id of 1 means layer outputs" in rule
    assert "[2, 5, 7] therefore means depths 2, 5, 7" in rule


def test_a_wrong_set_in_a_wrong_order_needs_both_mends(tmp_path: Path) -> None:
    report = diff(write_train(tmp_path / "t.h5", (8, 3, 6)), write_infer(tmp_path / "i.h5", (2, 3, 6)))
    assert _ids(report) == "eagle_aux_hidden_state_layer_ids: [1, 2, 5]  ->  [2, 5, 7]"
    assert any("fc.weight in the order [1, 2, 0]" in step for step in report.findings[0].mend.steps)


def test_a_chunk_that_the_server_never_captured(tmp_path: Path) -> None:
    report = diff(
        write_train(tmp_path / "t.h5", (3, 6, 9)), write_infer(tmp_path / "i.h5", (3, 6), ids=[2, 5, 8])
    )
    assert _only(report, "HS103") == "the draft is handed 2 chunks and was trained on 3"
    assert report.findings[0].mend.change is None
    assert "never captures the output of the last layer (depth 9)" in report.findings[0].mend.steps[0]


def test_a_single_chunk_of_a_trained_depth_is_no_other_algorithm(tmp_path: Path) -> None:
    report = diff(
        write_train(tmp_path / "t.h5", (3, 6, 8)), write_infer(tmp_path / "i.h5", (8,), ids=[2, 5, 7])
    )
    assert _only(report, "HS103") == "the draft is handed 1 chunk and was trained on 3"
    assert (
        "not served: depth 3 (output of layer 2), depth 6 (output of layer 5)" in report.findings[0].evidence
    )


def test_a_wrong_depth_in_decode_only(tmp_path: Path) -> None:
    infer = write_infer(tmp_path / "i.h5", (3, 6, 8), decode_depths=(3, 5, 8))
    report = diff(write_train(tmp_path / "t.h5", (3, 6, 8)), infer)
    assert _only(report, "HS304") == "aux chunk 1 is right in prefill and verify and wrong in decode"
    assert "depth 5 (output of layer 4)" in report.findings[0].evidence[0]


def test_a_wrong_depth_in_passes_of_graphs_only(tmp_path: Path) -> None:
    graphs = [(request, Phase.DECODE) for request in range(4)]
    infer = write_infer(tmp_path / "i.h5", (3, 6, 8), decode_depths=(3, 5, 8), graphs=graphs)
    report = diff(write_train(tmp_path / "t.h5", (3, 6, 8)), infer)
    assert _only(report, "HS304") == (
        "aux chunk 1 is right in prefill and verify and wrong in decode, which CUDA graphs replay"
    )
    (finding,) = report.findings
    assert finding.evidence[0].startswith("the server ran prefill eagerly, verify eagerly, decode from CUDA")
    assert "captured with other layers than the configured ids" in finding.mend.steps[0]


def test_a_phase_that_is_right_from_graphs_too_does_not_blame_them(tmp_path: Path) -> None:
    graphs = [(request, phase) for request in range(4) for phase in (Phase.DECODE, Phase.VERIFY)]
    infer = write_infer(tmp_path / "i.h5", (3, 6, 8), decode_depths=(3, 5, 8), graphs=graphs)
    report = diff(write_train(tmp_path / "t.h5", (3, 6, 8)), infer)
    assert _only(report, "HS304") == "aux chunk 1 is right in prefill and verify and wrong in decode"


def test_the_final_norm_in_a_chunk(tmp_path: Path) -> None:
    def spoil(name: str, x: Floats) -> Floats:
        if name.startswith("aux@"):
            last = x[:, -64:]
            x[:, -64:] = last / np.sqrt((last**2).mean(axis=1, keepdims=True) + 1e-6)
        return x

    infer = write_infer(tmp_path / "i.h5", (3, 6, 9), spoil=spoil)
    report = diff(write_train(tmp_path / "t.h5", (3, 6, 9)), infer)
    assert _only(report, "HS201") == "aux chunk 2 is depth 9 (output of layer 8) after the final norm"


class TestOnlyAux:
    """Captures that hold nothing but what the draft is handed."""

    @pytest.fixture(params=["aux", "draft.input"])
    def sites(self, request: pytest.FixtureRequest) -> list[str]:
        return [request.param]

    def test_the_right_wiring_is_an_all_clear(self, tmp_path: Path, sites: list[str], world: World) -> None:
        train = write_train(tmp_path / "t.h5", (3, 6, 8), world=world)
        report = diff(train, write_infer(tmp_path / "i.h5", (3, 6, 8), world=world, sites=sites))
        assert report.same
        handover = [note for note in report.notes if "fault in the handover cannot be told" in note]
        assert bool(handover) == (sites == ["draft.input"])

    def test_the_embedding_is_known_by_its_repeats(
        self, tmp_path: Path, sites: list[str], world: World
    ) -> None:
        train = write_train(tmp_path / "t.h5", (3, 6, 8), world=world)
        report = diff(train, write_infer(tmp_path / "i.h5", (0, 3, 6), world=world, sites=sites))
        assert "aux chunk 0 carries the embedding output (depth 0)" in _only(report, "HS102")
        assert _ids(report) == "eagle_aux_hidden_state_layer_ids: [-1, 2, 5]  ->  [2, 5, 7]"

    def test_a_swap_is_found_and_the_dump_blamed(self, tmp_path: Path, sites: list[str]) -> None:
        train = write_train(tmp_path / "t.h5", (6, 3, 8), declare=(3, 6, 8))
        report = diff(train, write_infer(tmp_path / "i.h5", (3, 6, 8), sites=sites))
        assert _only(report, "HS104").endswith("trained on depths 6, 3, 8, served 3, 6, 8")

    def test_the_servers_account_is_used_and_called_so(self, tmp_path: Path, sites: list[str]) -> None:
        train = write_train(tmp_path / "t.h5", (3, 6, 8))
        report = diff(train, write_infer(tmp_path / "i.h5", (2, 5, 7), sites=sites))
        assert "served depths 2, 5, 7, trained on 3, 6, 8, by the server's account" in _only(report, "HS101")
        assert _ids(report) == "eagle_aux_hidden_state_layer_ids: [1, 4, 6]  ->  [2, 5, 7]"
        assert report.findings[0].confidence < 1
        assert "--sites aux,layer" in " ".join(report.findings[0].evidence)

    def test_without_an_account_it_says_what_it_cannot_tell(self, tmp_path: Path, sites: list[str]) -> None:
        train = write_train(tmp_path / "t.h5", (3, 6, 8))
        infer = write_infer(tmp_path / "i.h5", (3, 5, 8), sites=sites, account=False)
        report = diff(train, infer)
        assert _only(report, "HS599").startswith("aux chunk 1 matches nothing that was captured")
        assert "capture with '--sites aux,layer'" in report.findings[0].mend.steps[0]

    def test_undeclared_chunks_are_compared_and_ids_are_not_invented(
        self, tmp_path: Path, sites: list[str]
    ) -> None:
        train = write_train(tmp_path / "t.h5", (3, 6, 8), declare=None)
        assert diff(train, write_infer(tmp_path / "i.h5", (3, 6, 8), sites=sites)).same
        report = diff(train, write_infer(tmp_path / "j.h5", (0, 3, 6), sites=sites))
        assert _ids(report) is None
        assert "no ids can be given" in report.findings[0].mend.steps[0]
        assert any("does not say which depths" in note for note in report.notes)


class TestReference:
    """The training side is the whole model."""

    def test_the_server_is_checked_at_the_depths_it_was_asked_for(self, tmp_path: Path, world: World) -> None:
        train = write_train(tmp_path / "t.h5", every=True, world=world)
        report = diff(train, write_infer(tmp_path / "i.h5", (3, 6, 8), world=world))
        assert report.same
        assert [line.trained_from for line in report.chunks] == ["asked for"] * 3
        assert [line.depth for line in report.layers] == [*range(L + 1), "final"]
        assert all(line.rows == 162 for line in report.layers)

    def test_chunks_other_than_asked_for_are_named(self, tmp_path: Path) -> None:
        account = {"aux": {"depths": [3, 6, 8]}}
        infer = write_infer(tmp_path / "i.h5", (3, 5, 8), provenance=account, sites=["aux"])
        report = diff(write_train(tmp_path / "t.h5", every=True), infer)
        assert _only(report, "HS102").startswith(
            "aux chunk 1 carries depth 5 (output of layer 4); the server was asked"
        )

    def test_depths_without_aux_are_compared_and_the_limit_is_said(self, tmp_path: Path) -> None:
        infer = write_infer(tmp_path / "i.h5", sites=["layer"])
        report = diff(write_train(tmp_path / "t.h5", every=True), infer)
        assert report.same
        assert len(report.layers) == L + 2
        assert any("not which of them the draft is handed" in note for note in report.notes)


def test_equal_layers_rule_out_nothing(tmp_path: Path) -> None:
    """A layer that adds nothing makes two depths the same; neither is then wrong."""

    world = World(shrink=0.0)
    train = write_train(tmp_path / "t.h5", (3, 6, 8), world=world)
    report = diff(train, write_infer(tmp_path / "i.h5", (3, 6, 8), world=world, jitter=0))
    assert report.same


def test_every_chunk_is_marked_in_its_state(tmp_path: Path) -> None:
    report = diff(write_train(tmp_path / "t.h5", (3, 6, 8)), write_infer(tmp_path / "i.h5", (3, 5, 8)))
    assert [line.state for line in report.chunks] == [State.OK, State.WRONG, State.OK]
