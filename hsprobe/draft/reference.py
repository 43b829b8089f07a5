"""Loads an EAGLE-3 draft from its checkpoint, with what SGLang takes from the target's.

Source: ``sglang/srt/models/llama_eagle3.py:load_weights`` and
``speculative/eagle_worker_v2.py:init_lm_head`` (0.5.23).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from hsprobe.draft.checkpoint import floating, read_tensors, target_embedding, target_head
from hsprobe.draft.config import DraftConfig, read_config
from hsprobe.draft.stages import DraftReference, KVCache, StageOutputs
from hsprobe.errors import HsprobeError

__all__ = ["DraftReference", "KVCache", "StageOutputs", "canonical", "load"]

_LEGACY = (
    ("midlayer.", "layers.0."),
    ("aux_norm_low.", "fc_norm.0."),
    ("aux_norm_mid.", "fc_norm.1."),
    ("aux_norm_high.", "fc_norm.2."),
)


def canonical(name: str) -> str:
    """A checkpoint's name of a weight as SGLang's module calls it, without `model.`"""
    for old, new in _LEGACY:
        name = name.replace(old, new)
    return name.removeprefix("model.")


def load(
    target: Path | str | None, draft: Path | str, dtype: str = "float32", device: str = "cpu"
) -> DraftReference:
    """Load the draft of a folder; the embedding, and a lm_head that it lacks, are the target's.

    Args:
        target: the target's folder; None where the draft has both of its own.
        dtype: torch's name of the dtype to compute in.

    Raises:
        HsprobeError: a folder or weight is missing, damaged, quantised, or not of the configured shape.
    """
    config = read_config(draft)
    stored = {
        canonical(name): tensor
        for name, tensor in read_tensors(draft, lambda name: "t2d" not in name).items()
    }
    # Which norms stand before fc is told by the weights: a configuration may have lost its flag.
    config = replace(
        config, norm_before_fc="input_norm.weight" in stored, fc_norm="fc_norm.0.weight" in stored
    )
    own = stored.pop("embed_tokens.weight", None)
    embedding = own if config.own_embedding and own is not None else _from(target, own, target_embedding)
    if config.tied:
        head = embedding
    elif config.own_head:
        head = _present(stored, "lm_head.weight", config)
    else:
        head = _from(target, stored.get("lm_head.weight"), target_head)
    stored.pop("lm_head.weight", None)
    offsets = stored.pop("d2t", None)
    ids = torch.arange(len(head))
    if offsets is not None and len(offsets) != len(ids):
        raise HsprobeError(
            f"d2t in {draft} has {len(offsets)} entries for {len(ids)} rows of lm_head.",
            "Check the checkpoint.",
        )
    weights = {name: _present(stored, name, config) for name in _needed(config)}
    weights.update({name: stored[name] for name in stored if name.endswith(".bias")})
    _check_shapes(weights, embedding, head, config)
    return DraftReference(
        config=config,
        weights={name: weight.to(device) for name, weight in weights.items()},
        embedding=embedding.to(device),
        head=head.to(device),
        token_of=(ids if offsets is None else ids + offsets.long()).to(device),
        dtype=getattr(torch, dtype),
        own_embedding=None if own is None or own is embedding else own.to(device),
    )


def _from(target: Path | str | None, own: Tensor | None, read: Callable[[Path | str], Tensor]) -> Tensor:
    if target is not None:
        return read(target)
    if own is None:
        raise HsprobeError(
            "The draft takes its embedding from the target, and no target's folder is known.",
            "Give it with --target.",
        )
    return own


def _needed(config: DraftConfig) -> list[str]:
    names = ["fc.weight", "norm.weight", "layers.0.input_layernorm.weight"]
    if config.norm_before_fc:
        names.append("input_norm.weight")
    if config.fc_norm:
        names += [f"fc_norm.{k}.weight" for k in range(config.chunks)]
    for layer in range(config.layers):
        names += [f"layers.{layer}.self_attn.{part}_proj.weight" for part in "qkvo"]
        names += [f"layers.{layer}.mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
        names += [f"layers.{layer}.{norm}.weight" for norm in ("hidden_norm", "post_attention_layernorm")]
    return names


def _present(stored: Mapping[str, Tensor], name: str, config: DraftConfig) -> Tensor:
    if name not in stored:
        raise HsprobeError(
            f"{config.folder} holds no {name}, which its configuration asks for.",
            "Check the checkpoint and its config.json.",
        )
    return floating(stored[name], name, config.folder)


def _check_shapes(
    weights: Mapping[str, Tensor], embedding: Tensor, head: Tensor, config: DraftConfig
) -> None:
    width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
    wanted = {"fc.weight": (config.hidden, config.aux_width), "norm.weight": (config.hidden,)}
    for layer in range(config.layers):
        part = f"layers.{layer}.self_attn."
        entered = config.hidden if layer else 2 * config.hidden
        wanted |= {f"{part}q_proj.weight": (width, entered), f"{part}o_proj.weight": (config.hidden, width)}
        wanted |= {f"{part}{name}_proj.weight": (kv_width, entered) for name in "kv"}
    shapes = {name: tuple(weights[name].shape) for name in wanted}
    wanted |= {"the embedding": (len(embedding), config.hidden), "lm_head": (len(head), config.hidden)}
    shapes |= {"the embedding": tuple(embedding.shape), "lm_head": tuple(head.shape)}
    for name, shape in wanted.items():
        if shapes[name] != shape:
            raise HsprobeError(
                f"{name} of {config.folder} has shape {list(shapes[name])}, not {list(shape)} as configured.",
                "Check that config.json and weights belong together, and --target.",
            )
