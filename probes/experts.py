"""How many routed experts a layer of a model has, from its Hugging Face configuration."""

from typing import Any

# DeepSeek, GLM-4-MoE and Kimi; Qwen's; Mixtral, gpt-oss and MiniMax (transformers 5.19, configuration_*.py).
_KEYS = ("n_routed_experts", "num_experts", "num_local_experts")


def experts_of(config: Any) -> int:
    """Routed experts a layer, 0 for a dense model; looks into the text model of a multimodal one."""
    config = getattr(config, "text_config", None) or config
    counts = (getattr(config, key, None) for key in _KEYS)
    return next((count for count in counts if isinstance(count, int) and count > 0), 0)
