"""What probes show of themselves: states that are right, one part early, too alike to tell, or absent."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hsprobe.probes.sglang.identity import Sample, agreement, norm_score, sum_score
from hsprobe.probes.sglang.labels import read_pass
from hsprobe.probes.sglang.proof import MOST_PASSES, PASSES, SILENT_PASSES, Proof
from hsprobe.probes.sglang.witness import looked_up

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TARGET, DRAFT = SimpleNamespace(is_draft_worker=False), SimpleNamespace(is_draft_worker=True)
WIDTH, DEPTHS = 64, (0, 1)


class Norm(nn.Module):
    """An RMS norm that rounds to the dtype where `fused` ones do not."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(WIDTH, generator=torch.Generator().manual_seed(5)))
        self.weight.data = self.weight.data.to(dtype)

    def exact(self, x_TW: torch.Tensor) -> torch.Tensor:
        x = x_TW.float()
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()

    def forward(self, x_TW: torch.Tensor) -> torch.Tensor:
        return self.exact(x_TW).to(x_TW.dtype) * self.weight

    def fused(self, x_TW: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return (self.exact(x_TW) * self.weight.float()).to(dtype)


def layer(dtype: torch.dtype, *, branch: float = 0.14, rows: int = 6, seed: int = 0):
    """State, what is added to it, their sum, and what a fused norm makes of that; one channel is a sink."""
    generator = torch.Generator().manual_seed(seed)
    before = torch.randn(rows, WIDTH, generator=generator)
    before[:, 3] *= 1000
    before = before.to(dtype)
    added = (branch * torch.randn(rows, WIDTH, generator=generator)).to(dtype)
    whole, norm = before.float() + added.float(), Norm(dtype)
    return before, added, whole.to(dtype), norm.fused(whole, dtype), norm


def scores(taken, before, added, result, norm) -> tuple[list[float], list[float]]:
    s = Sample.of
    with torch.no_grad():
        found = norm_score(s(taken), s(before), result, norm), sum_score(s(taken), s(before), s(added))
    return tuple(one.tolist() for one in found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_right_state_agrees_and_the_one_before_does_not(dtype):
    before, added, taken, result, norm = layer(dtype)
    normed, summed = scores(taken, before, added, result, norm)
    assert min(normed[0], summed[0]) > 0.98
    assert max(normed[1], summed[1]) < 0.8
    normed, summed = scores(before, before, added, result, norm)
    assert max(normed[0], summed[0]) < 0.8


def test_what_cannot_be_compared_is_not():
    before, added, taken, result, norm = layer(torch.bfloat16)
    s = Sample.of
    assert norm_score(s(taken), None, result.to(torch.float8_e4m3fn), norm) is None
    assert norm_score(s(taken), None, (result, taken), norm) is None
    assert norm_score(s(taken), None, result[:3], norm) is None
    assert norm_score(s(taken), None, result, None) is None
    assert sum_score(s(taken), s(before), s(added[:3])) is None
    assert Sample.of(taken.unsqueeze(0)) is None
    assert Sample.of(torch.arange(6).view(2, 3)) is None


def test_rows_that_are_not_numbers_are_left_out_and_alone_tell_nothing():
    before, added, taken, result, norm = layer(torch.bfloat16)
    for tensor in (before, added, taken, result):
        tensor[2] = float("nan")
    normed, summed = scores(taken, before, added, result, norm)
    assert min(normed[0], summed[0]) > 0.98
    assert agreement(taken[2], taken[2], 2).isnan()


class Server:
    """Passes of a target of two layers whose probe takes what `read` makes of (state before, state)."""

    def __init__(self, read=lambda before, state: state, dtype: torch.dtype = torch.bfloat16) -> None:
        self.disarmed: dict[str, str] = {}
        self.proof = Proof(self.disarmed.setdefault)
        self.read, self.dtype, self.count = read, dtype, 0
        self.watched: list[str] = []
        self.proof.expect("layer", DEPTHS, compared=True, strict=True)
        self.proof.watch(lambda: self.watched.append("begun"), lambda: self.watched.append("ended"))

    def run(self, *, graph=False, silent=False, branch=0.14, rows=6, batch=None, runner=TARGET) -> list[dict]:
        self.count += 1
        batch = batch or prefill(rows)
        current = read_pass(self.count, self.count, runner, batch)
        if not self.proof.open[current.form.is_draft]:
            return []
        self.proof.begin(current, batch)
        current.graph = graph
        if graph:
            self.proof.graph(draft=current.form.is_draft)
        if not (graph or silent or "layer" in self.disarmed or current.form.is_draft):
            for depth in DEPTHS:
                before, added, state, result, norm = layer(self.dtype, branch=branch, rows=rows, seed=depth)
                self.proof.saw("layer", depth, self.read(before, state), None)
                with torch.no_grad():
                    self.proof.part("layer", depth, Sample.of(before), Sample.of(added), result, norm)
        return self.proof.end(current)

    def state(self, site: str) -> tuple[str, str]:
        (header,) = (one for one in self.proof.news(everything=True) if one["site"] == site)
        return header["state"], header["why"]


def prefill(rows: int, first: int = 0, **more):
    found = {
        "forward_mode": SimpleNamespace(name="EXTEND"),
        "rids": ["a"],
        "input_ids": torch.arange(rows),
        "positions": torch.arange(rows) + first,
        "extend_seq_lens_cpu": [rows],
        "extend_prefix_lens_cpu": [first],
        "capture_hidden_mode": None,
    }
    return SimpleNamespace(**{**found, **more})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_probe_that_reads_rightly_is_proven_and_then_left_alone(dtype):
    server = Server(dtype=dtype)
    told = server.run()
    assert {one["site"]: one["state"] for one in told} == {"labels": "proven", "layer": "proven"}
    assert server.watched == ["begun", "ended"]
    assert not server.proof.open[False]
    assert not server.proof.active
    assert server.disarmed == {}


def test_a_probe_that_reads_the_state_before_is_disarmed_with_the_depth():
    server = Server(lambda before, state: before)
    told = {one["site"]: one for one in server.run()}
    assert told["layer"]["state"] == "disarmed"
    assert told["layer"]["refuted"]
    assert "at depth 0, it is not what the norm there was given" in told["layer"]["why"]
    assert server.disarmed["layer"] == told["layer"]["why"]


def test_states_too_alike_to_tell_show_nothing_and_refute_nothing():
    server = Server()
    for _ in range(PASSES):
        server.run(branch=1e-4)
    assert server.state("layer") == ("unproven", "the state before it would have passed as well")
    assert server.disarmed == {}
    assert server.watched == ["begun", "ended"]


def test_layers_that_hand_nothing_over_are_a_place_that_was_not_found():
    server = Server()
    for _ in range(SILENT_PASSES):
        assert server.disarmed == {}
        server.run(silent=True)
    assert "nothing came by for depth 0, 1" in server.disarmed["layer"]


def test_silence_with_a_reason_is_not_held_against_a_probe():
    server = Server()
    server.proof.doubt("layer", "SGLang ran the batch in two halves")
    for _ in range(PASSES):
        server.run(silent=True)
    assert server.state("layer") == ("unproven", "SGLang ran the batch in two halves")
    assert server.disarmed == {}


def test_what_only_graphs_run_is_told_and_not_accused():
    server = Server()
    for _ in range(3 * PASSES):
        server.run(graph=True)
    assert server.watched == ["begun"]
    assert server.state("layer") == ("unproven", "only CUDA graphs ran what could show it")
    assert server.disarmed == {}
    server.run()
    assert server.state("layer")[0] == "proven"


def test_where_nothing_but_graphs_ever_runs_looking_ends():
    server = Server()
    for _ in range(MOST_PASSES):
        assert server.proof.open[False]
        server.run(graph=True)
    assert not server.proof.open[False]
    assert server.watched == ["begun", "ended"]
    assert server.state("layer") == ("unproven", "only CUDA graphs ran what could show it")


def test_a_probe_that_failed_by_itself_keeps_its_own_reason():
    server = Server()
    assert server.proof.stopped("layer", "RuntimeError: broken")
    assert not server.proof.stopped("graphs", "no room")
    for _ in range(PASSES):
        server.run(silent=True)
    assert server.state("layer") == ("disarmed", "RuntimeError: broken")
    assert server.disarmed == {}


def test_lengths_that_contradict_one_another_end_the_recording():
    server = Server()
    server.run(batch=prefill(6, extend_seq_lens_cpu=[5]))
    assert "5 rows of its requests" in server.disarmed["pass"]
    assert server.state("labels")[0] == "disarmed"


def test_positions_beside_the_lengths_are_told_and_nothing_is_disarmed():
    server = Server()
    server.run(batch=prefill(6, first=3, extend_prefix_lens_cpu=[2]))
    state, why = server.state("labels")
    assert state == "unproven"
    assert "positions of a prefill pass do not follow" in why
    assert server.disarmed == {}
    server.run(batch=prefill(6, first=3))
    assert server.state("labels")[0] == "proven"


def test_aux_that_is_not_what_the_server_declares_is_told_and_not_disarmed():
    server, wrong = Server(), Server()
    for one, depths in ((server, [1]), (wrong, [0])):
        run = one.proof._compare
        one.proof._compare = lambda one=one, depths=depths, run=run: (
            one.proof.saw("aux", None, layer(torch.bfloat16, seed=1)[2], depths), run()
        )  # fmt: skip
        one.run()
    assert server.state("aux") == ("proven", "")
    assert wrong.state("aux")[0] == "unproven"
    assert "not depth 0, as the server declares" in wrong.state("aux")[1]
    assert wrong.disarmed == {}


def test_the_drafts_parts_are_shown_as_they_come_and_those_it_lacks_are_named():
    server = Server()
    server.proof.expect("draft.fc", draft=True)
    server.proof.expect("draft.qkv", draft=True)
    server.proof.doubt("draft.qkv", "LlamaModel has no layers.0.self_attn.qkv_proj")
    batch = prefill(4)
    for number in range(PASSES):
        server.count += 1
        current = read_pass(server.count, number, DRAFT, batch)
        server.proof.begin(current, batch)
        server.proof.saw("draft.fc", None, torch.ones(4, WIDTH), None)
        server.proof.end(current)
    assert server.state("draft.fc") == ("proven", "")
    assert server.state("draft.qkv") == ("unproven", "LlamaModel has no layers.0.self_attn.qkv_proj")


def test_a_self_test_that_fails_says_so_and_leaves_the_probes_armed():
    server = Server()
    server.run(silent=True)
    server.proof.give_up("RuntimeError: out of memory")
    assert server.state("layer") == ("unproven", "the self-test failed: RuntimeError: out of memory")
    assert server.watched == ["begun", "ended"]
    assert server.disarmed == {}


def test_an_embedding_is_held_against_its_rows_of_this_ranks_tokens():
    weight, ids = torch.randn(8, WIDTH), torch.tensor([9, 3, 11, 20])
    shard = SimpleNamespace(org_vocab_start_index=8, org_vocab_end_index=16)
    found = looked_up(weight, ids, shard)
    assert found.rows_RW.isnan().all(dim=1).tolist() == [False, True, False, True]
    assert torch.equal(found.rows_RW[[0, 2]], weight[[1, 3]])
    assert looked_up(weight, torch.tensor([1, 7]), None).rows_RW.equal(weight[[1, 7]])
