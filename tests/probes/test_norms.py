"""The probe of releases whose layers return pairs: what it takes, and what it shows of that.

Letters: T rows, W width.
"""

from types import SimpleNamespace

import pytest
import torch
from rig import Rig, W
from torch import nn

from hsprobe.probes.sglang.norms import NormProbe

ROWS, LAYERS = 4, 2


class Norm(nn.Module):
    """SGLang's RMSNorm: alone, or adding to a residual that it overwrites."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(W, generator=generator), requires_grad=False)

    def forward(self, x_TW: torch.Tensor, residual_TW: torch.Tensor | None = None):
        if residual_TW is not None:
            x_TW = residual_TW.add_(x_TW)
        normed = x_TW * (x_TW.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight
        return normed if residual_TW is None else (normed, residual_TW)


class Communicator:
    """SGLang's LayerCommunicator of one rank, with the probe's hooks where SGLang's registry puts them."""

    def __init__(self, layer: "Layer") -> None:
        self.input_layernorm = layer.input_layernorm
        self.post_attention_layernorm = layer.post_attention_layernorm

    def prepare_attn(self, hidden_states, residual, forward_batch):
        if residual is None:
            return self.input_layernorm(hidden_states), hidden_states
        return self.input_layernorm(hidden_states, residual)

    def prepare_mlp(self, hidden_states, residual, forward_batch):
        return self.post_attention_layernorm(hidden_states, residual)


class Layer(nn.Module):
    def __init__(self, number: int, kind: type | None) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(2 * number), Norm(2 * number + 1)
        self.communicator_class = kind
        if kind is not None:
            self.layer_communicator = kind(self)

    def forward(self, hidden, residual):
        if self.communicator_class is not None:
            batch = SimpleNamespace()
            hidden, residual = self.layer_communicator.prepare_attn(hidden, residual, batch)
            # Three of SGLang's models pass them by name.
            attention = 0.3 * torch.tanh(hidden)
            hidden, residual = self.layer_communicator.prepare_mlp(
                hidden_states=attention, residual=residual, forward_batch=batch
            )
        elif residual is None:
            residual, hidden = hidden, self.input_layernorm(hidden)
            hidden, residual = self.post_attention_layernorm(0.3 * torch.tanh(hidden), residual)
        else:
            hidden, residual = self.input_layernorm(hidden, residual)
            hidden, residual = self.post_attention_layernorm(0.3 * torch.tanh(hidden), residual)
        return 0.2 * torch.sin(hidden), residual


class Target(nn.Module):
    def __init__(self, kind: type | None = None) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(99, W)
        self.model.embed_tokens.requires_grad_(False)
        self.model.layers = nn.ModuleList(Layer(i, kind) for i in range(LAYERS))
        self.model.norm = Norm(77)

    def forward(self, ids):
        hidden, residual = self.model.embed_tokens(ids), None
        for layer in self.model.layers:
            hidden, residual = layer(hidden, residual)
        return self.model.norm(hidden, residual)[0]


class Server(Rig):
    """A rig with a target of plain norms or of communicators; `misread` has the probe take something else."""

    def __init__(self, folder, communicates: bool, tp_size: int = 1) -> None:
        super().__init__(folder, ROWS)
        self.probe = NormProbe(self.recorder)
        kind = None
        if communicates:
            hooked = {
                target.rpartition(".")[2]: _after(getattr(Communicator, target.rpartition(".")[2]), hook)
                for target, _, hook in self.probe.hooks()
            }
            kind = type("Hooked", (Communicator,), hooked)
        torch.manual_seed(1)
        self.target = Target(kind)
        config = SimpleNamespace(num_hidden_layers=LAYERS)
        self.probe.attach(
            SimpleNamespace(is_draft_worker=False, model=self.target, model_config=config, tp_size=tp_size)
        )

    def serve(self, passes: int = 1) -> None:
        self.arm()
        for _ in range(passes):
            self.ids_R = torch.randint(0, 99, (ROWS,), dtype=torch.int32)
            self.step(["a"], ROWS, "EXTEND", lambda: self.target(self.ids_R))

    def state(self, site: str) -> tuple[str, str]:
        found = self.recorder.proof.news(everything=True)
        (header,) = (one for one in found if one["site"] == site)
        return header["state"], header["why"]


def _after(original, hook):
    def call(*args, **kwargs):
        result = original(*args, **kwargs)
        hook(result, *args, **kwargs)
        return result

    return call


@pytest.mark.parametrize("communicates", [False, True], ids=["norms", "communicators"])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_layer_mid_and_embed_are_proven_and_nothing_is_left_in_place(tmp_path, communicates, tp_size):
    server = Server(tmp_path, communicates, tp_size)
    hooks = [len(norm._forward_hooks) for norm in server.target.modules()]
    server.serve()
    for site in ("layer", "mid", "embed"):
        assert server.state(site) == ("proven", "")
    server.serve(passes=5)
    assert [len(norm._forward_hooks) for norm in server.target.modules()] == hooks
    assert not any(len(norm._forward_pre_hooks) for norm in server.target.modules())
    for layer in server.target.model.layers:
        assert "prepare_attn" not in vars(getattr(layer, "layer_communicator", layer))


@pytest.mark.parametrize("communicates", [False, True], ids=["norms", "communicators"])
def test_a_probe_that_takes_other_rows_is_disarmed(tmp_path, communicates, monkeypatch):
    take = NormProbe._take
    monkeypatch.setattr(NormProbe, "_take", lambda self, site, d, x: take(self, site, d, x.roll(1, 0)))
    server = Server(tmp_path, communicates)
    server.serve()
    for site in ("layer", "mid"):
        state, why = server.state(site)
        assert state == "disarmed"
        assert "it is not what the norm there was given" in why or "it is not the state before" in why


def test_a_norm_that_is_called_otherwise_ends_the_probe_and_not_the_server(tmp_path):
    server = Server(tmp_path, communicates=False)
    first = server.target.model.layers[0]
    first.forward = lambda hidden, residual: (first.input_layernorm(x_TW=hidden), hidden)
    server.serve()
    assert server.state("layer")[0] == "disarmed"
    server.serve(passes=2)


def test_a_layer_that_hands_on_its_state_otherwise_is_told_by_its_silence(tmp_path):
    server = Server(tmp_path, communicates=False)
    silent = server.target.model.layers[1]
    silent.forward = lambda hidden, residual: (0.1 * hidden, residual)
    server.serve(passes=3)
    state, why = server.state("layer")
    assert state == "disarmed"
    assert "nothing came by for depth 1" in why
