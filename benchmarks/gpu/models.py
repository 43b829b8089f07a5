"""The models that are measured: a Llama of 16 x 1024 or 32 x 4096 and an EAGLE-3 draft, random weights."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCAB = 32000


@dataclass(frozen=True)
class Shape:
    """One model. `weights`: whether they are written, or made up by the server when it starts."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    weights: bool

    @property
    def ids(self) -> list[int]:
        """``eagle_aux_hidden_state_layer_ids`` of the draft."""
        return [1, self.layers // 2 - 1, self.layers - 4]


SHAPES = {
    "tiny": Shape(8, 128, 256, 2, 2, True),
    "small": Shape(16, 1024, 2816, 16, 8, True),
    "large": Shape(32, 4096, 14336, 32, 8, False),
}


def write(folder: Path, name: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Path, Path]:
    """Write target and draft; returns their folders."""
    shape = SHAPES[name]
    target, draft = folder / name, folder / f"{name}-draft"
    layers = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": shape.layers}
    write_config(target, {**_llama(shape, dtype), **layers})
    if shape.weights:
        save_file(_target_weights(shape, dtype), target / "model.safetensors")
    write_draft(draft, shape, dtype)
    return target, draft


def write_draft(folder: Path, shape: Shape, dtype: torch.dtype) -> None:
    """Write an EAGLE-3 draft for a target of this shape."""
    eagle = {"eagle_aux_hidden_state_layer_ids": shape.ids, "use_aux_hidden_state": True}
    config = {
        **_llama(shape, dtype),
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": VOCAB,
        "eagle_config": eagle,
    }
    write_config(folder, config)
    if shape.weights:
        save_file(_draft_weights(shape, dtype), folder / "model.safetensors")


def write_config(folder: Path, values: dict) -> None:
    """Make the folder of a model, with its configuration in it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values, indent=1))


def _llama(shape: Shape, dtype: torch.dtype) -> dict:
    return {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.hidden // shape.heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 8192,
        "model_type": "llama",
        "torch_dtype": str(dtype).removeprefix("torch."),
        "tie_word_embeddings": False,
        "vocab_size": VOCAB,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "attention_bias": False,
    }


class _Random:
    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._generator = torch.Generator(self._device).manual_seed(seed)
        self._dtype = dtype

    def __call__(self, *size: int, std: float | None = None) -> torch.Tensor:
        spread = size[-1] ** -0.5 if std is None else std
        noise = torch.randn(size, generator=self._generator, device=self._device)
        return (spread * noise).to(self._dtype).cpu()

    def norm(self, size: int) -> torch.Tensor:
        return (1 + self(size, std=0.1).float()).to(self._dtype)


def _block(random: _Random, shape: Shape, prefix: str, width: int) -> dict[str, torch.Tensor]:
    head, h = shape.hidden // shape.heads, shape.hidden
    made = {
        f"self_attn.{name}_proj": random(rows * head, width)
        for name, rows in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads))
    }
    made["self_attn.o_proj"] = random(h, shape.heads * head)
    made["mlp.gate_proj"] = random(shape.intermediate, h)
    made["mlp.up_proj"] = random(shape.intermediate, h)
    made["mlp.down_proj"] = random(h, shape.intermediate)
    made["input_layernorm"] = random.norm(h)
    made["post_attention_layernorm"] = random.norm(h)
    return {f"{prefix}.{name}.weight": weight for name, weight in made.items()}


def _target_weights(shape: Shape, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    random = _Random(dtype, 0)
    weights = {
        "model.embed_tokens.weight": random(VOCAB, shape.hidden, std=1.0),
        "lm_head.weight": random(VOCAB, shape.hidden),
        "model.norm.weight": random.norm(shape.hidden),
    }
    for layer in range(shape.layers):
        weights |= _block(random, shape, f"model.layers.{layer}", shape.hidden)
    return weights


def _draft_weights(shape: Shape, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    random = _Random(dtype, 1)
    return {
        "fc.weight": random(shape.hidden, 3 * shape.hidden),
        "norm.weight": random.norm(shape.hidden),
        "lm_head.weight": random(VOCAB, shape.hidden),
        "midlayer.hidden_norm.weight": random.norm(shape.hidden),
        **_block(random, shape, "midlayer", 2 * shape.hidden),
    }
