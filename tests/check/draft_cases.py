"""Drafts as checkpoints may come: what the rules say of them is held against the class that loads them."""

import copy
from collections.abc import Callable
from typing import Any

from tests.check.models import DRAFT, H, draft_tensors

Case = tuple[dict[str, Any], dict[str, Any]]


def _clean() -> Case:
    return copy.deepcopy(DRAFT), draft_tensors()


def _case(change: Callable[[dict[str, Any], dict[str, Any]], object]) -> Case:
    config, tensors = _clean()
    change(config, tensors)
    return config, tensors


def _without(*names: str) -> Case:
    return _case(lambda _, tensors: [tensors.pop(name) for name in names])


def _second_layer(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    config["num_hidden_layers"] = 2
    for name in [name for name in tensors if name.startswith("midlayer.")]:
        wide = [64 if size == 2 * H and "q_proj" in name else size for size in tensors[name]]
        tensors[name.replace("midlayer", "layers.1")] = wide
    for part in "kv":
        tensors[f"layers.1.self_attn.{part}_proj.weight"] = [32, H]


def _four_chunks(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [1, 3, 5, 6]
    tensors["fc.weight"] = [H, 4 * H]


def _norms(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    config |= {"fc_norm": True, "norm_before_fc": True}
    tensors |= {f"aux_norm_{which}.weight": [H] for which in ("low", "mid", "high")}
    tensors["input_norm.weight"] = [3 * H]


CASES: dict[str, Case] = {
    "clean": _clean(),
    "named layers.0": _case(
        lambda _, t: [t.update({n.replace("midlayer", "layers.0"): t.pop(n)}) for n in list(t) if "midl" in n]
    ),
    "named model.": _case(lambda _, t: [t.update({f"model.{n}": t.pop(n)}) for n in list(t) if "midl" in n]),
    "two layers": _case(_second_layer),
    "four chunks": _case(_four_chunks),
    "all norms": _case(_norms),
    "norms left out": _case(lambda c, t: (_norms(c, t), c.pop("fc_norm"), c.pop("norm_before_fc"))),
    "norm weights missing": _case(lambda c, _: c.update(fc_norm=True, norm_before_fc=True)),
    "no hidden_norm": _without("midlayer.hidden_norm.weight"),
    "no value projection": _without("midlayer.self_attn.v_proj.weight"),
    "no norm": _without("norm.weight"),
    "head of the target": _case(lambda c, t: (c.update(draft_vocab_size=None), t.pop("lm_head.weight"))),
    "tied": _case(lambda c, _: c.update(tie_word_embeddings=True)),
    "no draft_vocab_size": _case(lambda c, _: c.pop("draft_vocab_size")),
    "biases": _case(
        lambda _, t: t.update({"midlayer.self_attn.q_proj.bias": [64], "fc.bias": [H]}),
    ),
    "bias of fc": _case(lambda c, t: (c.update(bias=True), t.update({"fc.bias": [H]}))),
    "bias of attention": _case(
        lambda c, t: (c.update(attention_bias=True), t.update({"midlayer.self_attn.o_proj.bias": [H]})),
    ),
    "other name": _case(lambda _, t: t.update({"midlayer.self_attn.q_norm.weight": [16]})),
    "fc transposed": _case(lambda _, t: t.update({"fc.weight": [3 * H, H]})),
    "narrow fc": _case(lambda _, t: t.update({"fc.weight": [H, 2 * H]})),
    "short head": _case(lambda _, t: t.update({"lm_head.weight": [40, H]})),
    "other width of the target": _case(
        lambda c, t: (c.update(target_hidden_size=128), t.update({"fc.weight": [H, 384]})),
    ),
}


def shape(what: Any) -> list[int]:
    """The shape of a tensor of a case."""
    return list(what) if isinstance(what, list) else list(what.shape)
