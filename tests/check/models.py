"""Folders of models as a check needs them: a config.json, and safetensors files that are mostly holes."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

SIZES = {"BF16": 2, "F16": 2, "F32": 4, "I64": 8, "BOOL": 1, "F8_E4M3": 1}
H, L, V = 64, 9, 96
TARGET: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": H,
    "num_hidden_layers": L,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": V,
    "max_position_embeddings": 4096,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
DRAFT: dict[str, Any] = {
    **TARGET,
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": 48,
    "tie_word_embeddings": False,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5], "use_aux_hidden_state": True},
}
KEPT = np.arange(48) * 2 - (np.arange(48) % 2)
"""Target ids of the draft's tokens: ascending, now and then two neighbours."""


def draft_tensors() -> dict[str, Any]:
    """Name -> shape, or an array whose contents matter."""
    layer = {
        "hidden_norm.weight": [H],
        "input_layernorm.weight": [H],
        "post_attention_layernorm.weight": [H],
        "self_attn.q_proj.weight": [64, 2 * H],
        "self_attn.k_proj.weight": [32, 2 * H],
        "self_attn.v_proj.weight": [32, 2 * H],
        "self_attn.o_proj.weight": [H, 64],
        "mlp.gate_proj.weight": [128, H],
        "mlp.up_proj.weight": [128, H],
        "mlp.down_proj.weight": [H, 128],
    }
    return {
        "fc.weight": [H, 3 * H],
        "norm.weight": [H],
        "lm_head.weight": [48, H],
        "d2t": KEPT - np.arange(48),
        "t2d": np.isin(np.arange(V), KEPT),
        **{f"midlayer.{name}": sizes for name, sizes in layer.items()},
    }


def write_model(folder: Path, config: Any, tensors: Mapping[str, Any] | None = None) -> Path:
    """A folder with this config and, where there are any, these tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        write_safetensors(folder / "model.safetensors", tensors)
    return folder


def write_safetensors(path: Path, tensors: Mapping[str, Any], dtype: str = "BF16") -> None:
    """Shapes are of zeros that take no room on the disk; arrays are written as I64 or BOOL."""
    header: dict[str, Any] = {}
    arrays: list[tuple[int, bytes]] = []
    end = 0
    for name, what in tensors.items():
        kind, sizes = (dtype, list(what)) if isinstance(what, Sequence) else (_kind(what), list(what.shape))
        if isinstance(what, np.ndarray):
            arrays.append((end, what.tobytes()))
        start, end = end, end + SIZES[kind] * int(np.prod(sizes, dtype=np.int64))
        header[name] = {"dtype": kind, "shape": sizes, "data_offsets": [start, end]}
    raw = json.dumps(header).encode()
    with path.open("wb") as stream:
        stream.write(len(raw).to_bytes(8, "little") + raw)
        stream.truncate(8 + len(raw) + end)
        for start, data in arrays:
            stream.seek(8 + len(raw) + start)
            stream.write(data)


def some_map(size: int, vocabulary: int) -> Any:
    """A d2t that keeps the first and the last tokens of the target. [size] int64"""
    offsets = np.zeros(size, np.int64)
    offsets[size // 2 :] = vocabulary - size
    return offsets


def _kind(array: Any) -> str:
    return "BOOL" if array.dtype == bool else "I64"
