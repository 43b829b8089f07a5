"""What the configuration of an EAGLE-3 draft asks for, read as SGLang reads it.

Source: ``sglang/srt/models/llama_eagle3.py`` and ``models/llama.py`` (0.5.23), and the defaults of
transformers' ``LlamaConfig``, through which SGLang reads a ``config.json``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hsprobe.errors import HsprobeError

_ARCHITECTURE = "LlamaForCausalLMEagle3"
_DEFAULT_CHUNKS = 3
_DEFAULT_THETA = 10000.0
_DEFAULT_POSITIONS = 2048
_DEFAULT_EPS = 1e-6
_MOST_BYTES = 1 << 24
_BESIDE_SCALING = ("rope_theta", "partial_rotary_factor")


@dataclass(frozen=True)
class Rope:
    """How positions enter the attention.

    Attributes:
        base: `rope_theta`.
        scaling: the keys of `rope_scaling` or `rope_parameters`; its `rope_type` is "default", "linear",
            "llama3" or "yarn".
        dims: rotated channels of a head.
        limit: `max_position_embeddings`.
        neox: halves are rotated against each other, rather than neighbours.
    """

    base: float
    dims: int
    limit: int
    scaling: Mapping[str, Any] = field(default_factory=dict)
    neox: bool = True

    @property
    def kind(self) -> str:
        """The type of scaling, "default" for none."""
        return str(self.scaling.get("rope_type") or self.scaling.get("type") or "default")


@dataclass(frozen=True)
class DraftConfig:
    """The sizes and switches of a draft.

    Attributes:
        hidden, target_hidden: widths of the draft's and of the target's residual stream.
        chunks: how many aux chunks `fc` takes.
        norm_before_fc: one RMSNorm over the whole aux vector; fc_norm: one over each chunk.
        norm_output: the next step gets the state after the draft's norm, rather than before.
        own_embedding: the embedding is the checkpoint's own, rather than the target's.
        own_head: the same of lm_head. tied: lm_head is the embedding.
        folder: where the configuration was read.
    """

    folder: Path
    hidden: int
    target_hidden: int
    chunks: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    eps: float
    rope: Rope
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    own_embedding: bool = False
    own_head: bool = True
    tied: bool = False

    @property
    def aux_width(self) -> int:
        """Width of the vector that `fc` takes."""
        return self.chunks * self.target_hidden


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        HsprobeError: there is none.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError("it is too large for a configuration")
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise HsprobeError(
            f"{path} cannot be read: {error}.", "Give the folder of a checkpoint, with its config.json."
        ) from None
    if not isinstance(found, dict):
        raise HsprobeError(f"{path} holds no JSON object.", "Give the folder of a checkpoint.")
    return found


def read_config(folder: Path | str) -> DraftConfig:
    """Read the configuration of the draft in a folder.

    Raises:
        HsprobeError: it is missing, malformed, or not that of a Llama-like EAGLE-3 draft.
    """
    folder = Path(folder)
    path = folder / "config.json"
    given = read_json(path)
    named = given.get("architectures")
    names = ", ".join(map(str, named)) if isinstance(named, list) and named else "no architecture"
    if _ARCHITECTURE not in names:
        raise HsprobeError(
            f"{path} describes {names}, not a {_ARCHITECTURE}.",
            "hsprobe computes EAGLE-3 drafts of this class only; leave out --draft for others.",
        )
    try:
        return _config(folder, given)
    except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
        raise HsprobeError(
            f"{path} is not a whole configuration: {type(error).__name__} {error}.",
            "Check the draft's config.",
        ) from None


def _config(folder: Path, given: Mapping[str, Any]) -> DraftConfig:
    eagle = given.get("eagle_config")
    eagle = eagle if isinstance(eagle, dict) else {}
    hidden, heads = int(given["hidden_size"]), int(given["num_attention_heads"])
    head_dim = int(given.get("head_dim") or hidden // heads)
    if str(given.get("hidden_act", "silu")) != "silu":
        raise ValueError(f"hidden_act {given['hidden_act']!r} is not silu")
    target_hidden = int(given.get("target_hidden_size") or hidden)
    tied = bool(given.get("tie_word_embeddings", False))
    config = DraftConfig(
        folder=folder,
        hidden=hidden,
        target_hidden=target_hidden,
        chunks=_chunks(given, eagle),
        layers=int(given.get("num_hidden_layers", 1)),
        heads=heads,
        kv_heads=int(given.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        vocab=int(given["vocab_size"]),
        eps=float(given.get("rms_norm_eps", _DEFAULT_EPS)),
        rope=_rope(given, head_dim),
        norm_before_fc=bool(eagle.get("norm_before_fc", given.get("norm_before_fc", False))),
        fc_norm=bool(given.get("fc_norm") or given.get("use_aux_norm", False)),
        norm_output=bool(given.get("norm_output", False)),
        own_embedding=target_hidden != hidden,
        own_head=not tied and given.get("draft_vocab_size") is not None,
        tied=tied,
    )
    sizes = (
        hidden,
        target_hidden,
        config.chunks,
        config.layers,
        heads,
        config.kv_heads,
        head_dim,
        config.vocab,
    )
    if min(sizes) < 1 or heads % config.kv_heads:
        raise ValueError("its sizes do not fit together")
    return config


def _chunks(given: Mapping[str, Any], eagle: Mapping[str, Any]) -> int:
    stated = given.get("num_aux_hidden_states")
    ids = eagle.get("eagle_aux_hidden_state_layer_ids")
    return int(stated) if stated is not None else len(ids) if ids else _DEFAULT_CHUNKS


def rope_of(given: Mapping[str, Any]) -> Rope | None:
    """How the model of a configuration rotates; None where that is not whole."""
    try:
        heads = int(given["num_attention_heads"])
        return _rope(given, int(given.get("head_dim") or int(given["hidden_size"]) // heads))
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def _rope(given: Mapping[str, Any], head_dim: int) -> Rope:
    """transformers 5 merges `rope_theta` and `rope_scaling` into `rope_parameters` when it reads a config."""
    scaling = dict(given.get("rope_parameters") or given.get("rope_scaling") or {})
    original = given.get("original_max_position_embeddings")
    if scaling and original:
        scaling["original_max_position_embeddings"] = original
    if str(scaling.get("rope_type") or scaling.get("type") or "default") == "default":
        scaling = {key: value for key, value in scaling.items() if key in _BESIDE_SCALING}
    base = scaling.pop("rope_theta", None) or given.get("rope_theta") or _DEFAULT_THETA
    partial = float(scaling.pop("partial_rotary_factor", None) or given.get("partial_rotary_factor", 1.0))
    limit = int(given.get("max_position_embeddings", _DEFAULT_POSITIONS))
    return Rope(
        base=float(base),
        dims=int(partial * head_dim),
        limit=limit,
        scaling=scaling,
        neox=bool(given.get("rope_is_neox_style", True)),
    )
