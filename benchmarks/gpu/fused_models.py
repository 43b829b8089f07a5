"""Small models of the kinds whose sums over ranks SGLang fuses with the norms that follow, random weights.

    glm        GLM4-MoE: 3 dense layers, then mixtures of 8 experts
    glm-dense  GLM4-MoE with dense layers only
    gpt-oss    GPT-OSS: mixtures of 8 experts, sliding windows in every second layer

Each comes with an EAGLE-3 draft. The weights are scaled random integers, the same bits on every machine, so
that a reference can be computed elsewhere.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import models
import numpy as np
import torch
from safetensors.torch import save_file

SHAPE = models.Shape(8, 512, 1024, 8, 4, True)
HEAD = SHAPE.hidden // SHAPE.heads
EXPERTS, CHOSEN, EXPERT_WIDTH = 8, 2, 256
KINDS = ("glm", "glm-dense", "gpt-oss")


@dataclass
class _Random:
    generator: np.random.Generator

    def __call__(self, *size: int, std: float | None = None, mean: float = 0.0) -> torch.Tensor:
        spread = size[-1] ** -0.5 if std is None else std
        steps = self.generator.integers(-127, 128, size, dtype=np.int8)
        # A uniform distribution of so many steps has this spread.
        values = (mean + steps.astype(np.float32) * np.float32(spread / 73.3)).astype(ml_dtypes.bfloat16)
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)


def write(folder: Path, name: str) -> tuple[Path, Path]:
    """Write target and draft; returns their folders."""
    target, draft = folder / name, folder / f"{name}-draft"
    random = _Random(np.random.default_rng(KINDS.index(name)))
    made = _gpt_oss(random) if name == "gpt-oss" else _glm(random, SHAPE.layers if name == "glm-dense" else 3)
    config, weights = made
    models.write_config(target, config)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    models.write_draft(draft, SHAPE, torch.bfloat16)
    return target, draft


def digest(folder: Path) -> str:
    """Tells whether two machines have the same weights."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()[:16]


def _common(**more: object) -> dict:
    return {
        "hidden_size": SHAPE.hidden,
        "num_hidden_layers": SHAPE.layers,
        "num_attention_heads": SHAPE.heads,
        "num_key_value_heads": SHAPE.kv_heads,
        "head_dim": HEAD,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "vocab_size": models.VOCAB,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "num_experts_per_tok": CHOSEN,
        **more,
    }


def _ends(random: _Random) -> dict[str, torch.Tensor]:
    return {
        "model.embed_tokens.weight": random(models.VOCAB, SHAPE.hidden, std=1.0),
        "lm_head.weight": random(models.VOCAB, SHAPE.hidden),
        "model.norm.weight": random(SHAPE.hidden, std=0.1, mean=1.0),
    }


def _attention(random: _Random, bias: bool) -> dict[str, torch.Tensor]:
    made = {}
    for name, rows in (("q", SHAPE.heads * HEAD), ("k", SHAPE.kv_heads * HEAD), ("v", SHAPE.kv_heads * HEAD)):
        made[f"self_attn.{name}_proj.weight"] = random(rows, SHAPE.hidden)
        if bias:
            made[f"self_attn.{name}_proj.bias"] = random(rows, std=0.1)
    made["self_attn.o_proj.weight"] = random(SHAPE.hidden, SHAPE.heads * HEAD)
    if bias:
        made["self_attn.o_proj.bias"] = random(SHAPE.hidden, std=0.1)
    for name in ("input_layernorm", "post_attention_layernorm"):
        made[f"{name}.weight"] = random(SHAPE.hidden, std=0.1, mean=1.0)
    return made


def _mlp(random: _Random, prefix: str, width: int) -> dict[str, torch.Tensor]:
    return {
        f"{prefix}.gate_proj.weight": random(width, SHAPE.hidden),
        f"{prefix}.up_proj.weight": random(width, SHAPE.hidden),
        f"{prefix}.down_proj.weight": random(SHAPE.hidden, width),
    }


def _glm(random: _Random, dense: int) -> tuple[dict, dict[str, torch.Tensor]]:
    config = _common(
        architectures=["Glm4MoeForCausalLM"],
        model_type="glm4_moe",
        intermediate_size=SHAPE.intermediate,
        moe_intermediate_size=EXPERT_WIDTH,
        n_routed_experts=EXPERTS,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
        first_k_dense_replace=dense,
        attention_bias=False,
        use_qk_norm=False,
        partial_rotary_factor=0.5,
        rope_theta=10000.0,
    )
    weights = _ends(random)
    for number in range(SHAPE.layers):
        layer = _attention(random, bias=False)
        if number < dense:
            layer |= _mlp(random, "mlp", SHAPE.intermediate)
        else:
            layer["mlp.gate.weight"] = random(EXPERTS, SHAPE.hidden)
            layer["mlp.gate.e_score_correction_bias"] = torch.zeros(EXPERTS)
            layer |= _mlp(random, "mlp.shared_experts", EXPERT_WIDTH)
            for expert in range(EXPERTS):
                layer |= _mlp(random, f"mlp.experts.{expert}", EXPERT_WIDTH)
        weights |= {f"model.layers.{number}.{name}": weight for name, weight in layer.items()}
    return config, weights


def _gpt_oss(random: _Random) -> tuple[dict, dict[str, torch.Tensor]]:
    yarn = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    config = _common(
        architectures=["GptOssForCausalLM"],
        model_type="gpt_oss",
        intermediate_size=SHAPE.intermediate,
        num_local_experts=EXPERTS,
        experts_per_token=CHOSEN,
        attention_bias=True,
        sliding_window=128,
        swiglu_limit=7.0,
        layer_types=["sliding_attention", "full_attention"] * (SHAPE.layers // 2),
        rope_theta=150000.0,
        rope_scaling={**yarn, "original_max_position_embeddings": 4096},
        max_position_embeddings=131072,
    )
    weights = _ends(random)
    wide = SHAPE.intermediate
    for number in range(SHAPE.layers):
        layer = _attention(random, bias=True)
        layer["self_attn.sinks"] = random(SHAPE.heads, std=1.0)
        layer["mlp.router.weight"] = random(EXPERTS, SHAPE.hidden)
        layer["mlp.router.bias"] = random(EXPERTS, std=0.1)
        # Stored [expert, in, out].
        layer["mlp.experts.gate_up_proj"] = random(EXPERTS, SHAPE.hidden, 2 * wide, std=SHAPE.hidden**-0.5)
        layer["mlp.experts.gate_up_proj_bias"] = random(EXPERTS, 2 * wide, std=0.1)
        layer["mlp.experts.down_proj"] = random(EXPERTS, wide, SHAPE.hidden, std=wide**-0.5)
        layer["mlp.experts.down_proj_bias"] = random(EXPERTS, SHAPE.hidden, std=0.1)
        weights |= {f"model.layers.{number}.{name}": weight for name, weight in layer.items()}
    return config, weights
