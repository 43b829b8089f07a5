"""Load fabricated checkpoints into the installed SGLang's EAGLE-3 draft class, without a server."""

from typing import Any

import torch

from tests.check.draft_cases import CASES, shape


def outcomes() -> list[dict[str, Any]]:
    """For each case: the class's parameters by name and shape, which of them were loaded, or the error."""
    from sglang.test.layer_ut_utils import init_single_process_dist

    init_single_process_dist()
    return [
        _outcome({k: v for k, v in config.items() if k != "architectures"}, tensors)
        for config, tensors in CASES.values()
    ]


def _outcome(config: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3
    from transformers import LlamaConfig

    try:
        model = LlamaForCausalLMEagle3(LlamaConfig(**config))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        torch.nn.init.constant_(parameter, -7.0)
    shapes = {name: list(parameter.shape) for name, parameter in parameters.items()}
    try:
        model.load_weights((name, _made(name, shape(what))) for name, what in tensors.items())
    except Exception as error:
        return {"parameters": shapes, "error": f"{type(error).__name__}: {error}"}
    # A parameter fused of several tensors is loaded where none of its first values is left.
    loaded = [name for name, parameter in parameters.items() if not bool((parameter == -7.0).any())]
    return {"parameters": shapes, "loaded": loaded, "map": model.hot_token_id is not None}


def _made(name: str, sizes: list[int]) -> torch.Tensor:
    return torch.zeros(sizes, dtype=torch.int64 if "d2t" in name or "t2d" in name else torch.float32)
