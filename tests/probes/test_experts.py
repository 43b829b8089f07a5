"""The number of routed experts, whatever a configuration calls it."""

import pytest
from transformers import DeepseekV3Config, LlamaConfig, MixtralConfig, Qwen3MoeConfig

from hsprobe.probes.experts import experts_of


class _Wrapper:
    text_config = Qwen3MoeConfig(num_experts=16)


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (DeepseekV3Config(n_routed_experts=8), 8),
        (Qwen3MoeConfig(num_experts=16), 16),
        (MixtralConfig(num_local_experts=4), 4),
        (_Wrapper(), 16),
        (LlamaConfig(), 0),
    ],
)
def test_routed_experts_are_counted(config: object, count: int) -> None:
    assert experts_of(config) == count
