"""Which tensors SGLang's `LlamaForCausalLMEagle3` loads, under which names, in which shapes.

Source: `sglang/srt/models/llama_eagle3.py` (`LlamaModel`, `LlamaForCausalLMEagle3.load_weights`) in 0.5.9,
0.5.12.post1, 0.5.15.post1 and 0.5.23. Letters: H hidden size of the draft, T of the target, K chunks, V
vocabulary of the draft, N query heads and M key heads of size D, I width of the MLP.
"""

from __future__ import annotations

from dataclasses import dataclass

from hsprobe.check.setup import Setup

MULTI_LAYER = (0, 5, 12, 1)
"""First version with a list of layers, norms of chunks, `num_aux_hidden_states`; before, one `midlayer`."""
NORM_BEFORE_FC = (0, 5, 18)
_CHUNK_NORMS = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}
_FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj",
          "up_proj": "gate_up_proj"}  # fmt: skip
_QUANTIZED = ("F8_E4M3", "F8_E5M2", "F4", "U8", "I8", "I32")


@dataclass(frozen=True)
class Expected:
    """A tensor that the class loads. `shape` is None where the config does not say it."""

    shape: tuple[int, ...] | None
    required: bool = True


def known_layout(setup: Setup) -> bool:
    """Whether the draft is of the class whose layout is known, and its tensors can be looked at."""
    named = setup.draft.architecture == "LlamaForCausalLMEagle3"
    return named and setup.draft_weights.readable


def chunks(setup: Setup) -> int:
    """K that the draft's fc is built for."""
    if setup.number < MULTI_LAYER:
        return 3
    count = setup.draft.raw.get("num_aux_hidden_states")
    if isinstance(count, int) and not isinstance(count, bool) and 0 < count < 4096:
        return count
    ids = setup.draft.part("eagle_config").get("eagle_aux_hidden_state_layer_ids")
    return len(ids) if isinstance(ids, list) and ids else 3


def width_in(setup: Setup) -> int | None:
    """T as the draft's config has it: `target_hidden_size`, else its own hidden size."""
    return setup.draft.integer("target_hidden_size") or setup.draft.hidden_size


def quantized(setup: Setup) -> bool:
    """Whether the draft's weights are stored in another form than plain floats."""
    return bool(setup.draft.part("quantization_config")) or any(
        stored.dtype in _QUANTIZED and "d2t" not in name and "t2d" not in name
        for name, stored in setup.draft_weights.tensors.items()
    )


def canonical(setup: Setup, name: str) -> str:
    """A tensor's name in the file as SGLang's parameter, without the leading `model.`."""
    name = name.removeprefix("model.") if not name.startswith("model.lm_head") else name
    if setup.number < MULTI_LAYER:
        return name
    for old, new in (("midlayer", "layers.0"), *_CHUNK_NORMS.items()):
        name = name.replace(old, new)
    return name


def expected(setup: Setup) -> dict[str, Expected]:
    """Name -> what the class loads under it."""
    draft = setup.draft
    hidden, vocab = draft.hidden_size, draft.integer("draft_vocab_size")
    width = width_in(setup)
    count = chunks(setup)
    tied, from_target = draft.flag("tie_word_embeddings"), draft.get("draft_vocab_size") is None
    found = {
        "fc.weight": Expected(_sizes(hidden, width and width * count), required=not setup.captured.final),
        "norm.weight": Expected(_sizes(hidden)),
        "embed_tokens.weight": Expected(_sizes(draft.integer("vocab_size"), hidden), required=False),
    }
    if not tied:
        found["lm_head.weight"] = Expected(_sizes(vocab, hidden), required=not from_target)
    if draft.flag("bias"):
        found["fc.bias"] = Expected(_sizes(hidden))
    if per_chunk_norms(setup):
        found |= {f"fc_norm.{k}.weight": Expected(_sizes(width)) for k in range(min(count, 64))}
    if norm_before_fc(setup):
        found["input_norm.weight"] = Expected(_sizes(width and width * count))
    layers = 1 if setup.number < MULTI_LAYER else min(draft.num_layers or 1, 64)
    for index in range(layers):
        prefix = "midlayer" if setup.number < MULTI_LAYER else f"layers.{index}"
        found |= {f"{prefix}.{name}": one for name, one in _layer(setup, first=index == 0).items()}
    return found


def _layer(setup: Setup, *, first: bool) -> dict[str, Expected]:
    draft = setup.draft
    hidden, inner, size = draft.hidden_size, draft.integer("intermediate_size"), draft.head_dim
    heads = draft.integer("num_attention_heads")
    keys = draft.integer("num_key_value_heads") or heads
    query, key = (n * size if n and size else None for n in (heads, keys))
    width = 2 * hidden if first and hidden else hidden
    if draft.raw.get("model_type") == "llama4_text":
        inner = draft.integer("intermediate_size_mlp")
    shapes: dict[str, tuple[int | None, ...]] = {
        "self_attn.q_proj.weight": (query, width),
        "self_attn.k_proj.weight": (key, width),
        "self_attn.v_proj.weight": (key, width),
        "self_attn.o_proj.weight": (hidden, query),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "hidden_norm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if output_bias(setup):
        shapes["self_attn.o_proj.bias"] = (hidden,)
    found = {name: Expected(_sizes(*sizes)) for name, sizes in shapes.items()}
    # Later layers have the norm of the embedding too, and never use it.
    found["input_layernorm.weight"] = Expected(_sizes(hidden), required=first)
    return found


def fused(name: str) -> str:
    """The name under which a tensor would be if it were stored fused with its neighbours."""
    for part, whole in _FUSED.items():
        if f".{part}." in name:
            return name.replace(f".{part}.", f".{whole}.")
    return name


def per_chunk_norms(setup: Setup) -> bool:
    """Whether the class builds a norm for every chunk before fc."""
    asked = setup.draft.flag("fc_norm") or setup.draft.flag("use_aux_norm")
    return asked and setup.number >= MULTI_LAYER


def output_bias(setup: Setup) -> bool:
    """Whether the class builds a bias for o_proj: `models/llama.py`, LlamaDecoderLayer."""
    return setup.draft.flag("attention_bias") or setup.draft.flag("bias")


def norm_before_fc(setup: Setup) -> bool:
    """Whether the class builds one norm over all chunks before fc."""
    return asks_norm_before_fc(setup) and setup.number >= NORM_BEFORE_FC


def asks_norm_before_fc(setup: Setup) -> bool:
    """Whether the config asks for it, in eagle_config or at the top."""
    eagle = setup.draft.part("eagle_config")
    return bool(eagle.get("norm_before_fc", setup.draft.raw.get("norm_before_fc", False)))


def _sizes(*sizes: int | None) -> tuple[int, ...] | None:
    known = tuple(size for size in sizes if size)
    return known if len(known) == len(sizes) else None
