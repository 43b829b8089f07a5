"""What served the model: versions, configurations and arguments, as JSON-able facts."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hsprobe.probes.sglang.settings import Settings

SECRET_WORDS = ("key", "token_file", "password", "secret")


def coordinates() -> dict[str, int]:
    """This process's place: ``rank`` (in the world) and its tp, pp, dp and attention-tp ranks."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()

    def read(name: str) -> int:
        try:
            return int(getattr(parallel, name) or 0)
        except Exception:  # an axis this deployment has not set up
            return 0

    place = {axis: read(f"{axis}_rank") for axis in ("tp", "pp", "dp", "attn_tp")}
    place["rank"] = read("world_rank") or place["pp"] * max(read("tp_size"), 1) + place["tp"]
    return place


def captured_depths(model: torch.nn.Module) -> list[int] | None:
    """The depths a target hands to its draft, in the order of the concatenation.

    SGLang captures in ascending order whatever the order of the ids, and each depth once
    (``models/llama.py:LlamaModel.forward``); some models flag the layers instead
    (``models/qwen2_moe.py``).
    """
    for module in model.modules():
        depths = getattr(module, "layers_to_capture", None)
        if isinstance(depths, list | tuple) and depths:
            return sorted({int(depth) for depth in depths})
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList):
            flagged = [i for i, layer in enumerate(module) if getattr(layer, "_is_layer_to_capture", False)]
            if flagged:
                return flagged
    return None


def _config_of(runner: Any) -> dict[str, Any]:
    config = runner.model_config.hf_config
    path = Path(str(runner.model_config.model_path))
    text = path / "config.json"
    return {
        "path": str(path),
        "architecture": (getattr(config, "architectures", None) or [type(runner.model).__name__])[0],
        "num_layers": int(runner.model_config.num_hidden_layers),
        "hidden_size": int(runner.model_config.hidden_size),
        "dtype": str(runner.model_config.dtype).removeprefix("torch."),
        "config_sha256": hashlib.sha256(text.read_bytes()).hexdigest() if text.is_file() else None,
    }


def _draft_of(runner: Any) -> dict[str, Any]:
    config = runner.model_config.hf_config
    eagle = getattr(config, "eagle_config", None)
    eagle = dict(eagle) if isinstance(eagle, dict) else {}
    return {
        **_config_of(runner),
        "eagle_config": eagle,
        "aux_layer_ids": eagle.get("eagle_aux_hidden_state_layer_ids"),
    }


def _arguments_of(server_args: Any) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in vars(server_args).items():
        if name.startswith("_") or value is None or any(word in name for word in SECRET_WORDS):
            continue
        try:
            kept[name] = json.loads(json.dumps(value))
        except (TypeError, ValueError):
            kept[name] = str(value)
    return kept


def describe(runners: Sequence[Any], settings: Settings) -> dict[str, Any]:
    """Provenance of what this process serves; ``runners`` are its loaded ModelRunners."""
    import sglang

    facts: dict[str, Any] = {
        "producer": "sglang",
        "sglang_version": sglang.__version__,
        "torch_version": torch.__version__,
        "probes": sorted(settings.sites),
    }
    for runner in runners:
        if runner.is_draft_worker:
            facts["draft"] = _draft_of(runner)
        else:
            facts["model"] = _config_of(runner)
            facts["aux"] = {"depths": captured_depths(runner.model)}
            facts["server_args"] = _arguments_of(runner.server_args)
    return facts
