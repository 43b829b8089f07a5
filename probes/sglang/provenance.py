"""What served the model: versions, configurations and arguments, as JSON-able facts."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hsprobe.probes.experts import experts_of
from hsprobe.probes.sglang import places
from hsprobe.probes.sglang.settings import Settings

DRAFT_KEYS = (
    "rope_parameters",
    "rope_theta",
    "rope_scaling",
    "max_position_embeddings",
    "norm_before_fc",
    "fc_norm",
    "use_aux_norm",
    "norm_output",
    "target_hidden_size",
    "num_aux_hidden_states",
    "draft_vocab_size",
    "tie_word_embeddings",
)
"""Keys of a draft's configuration that change what it computes."""
SECRET_WORDS = ("key", "token_file", "password", "secret")


def coordinates(replica: int = 0, replicas: int = 1) -> dict[str, int]:
    """This process's place on each axis, and how long the axis is.

    ``rank`` counts over all replicas. ``dp`` is the replica, of either kind: attention DP does not run inside
    a replica of its own (``runtime_context.py:num_dp_ranks_of``).

    Args:
        replica, replicas: its place among whole replicas, where SGLang has no one object that knows.
    """
    look_up = _looked_up() if places.runtime_context() else _asked()

    def read(name: str, missing: int) -> int:
        try:
            return int(look_up(name) or missing)
        except Exception:  # an axis this deployment has not set up
            return missing

    place: dict[str, int] = {}
    for axis in ("tp", "pp", "attn_tp"):
        place[axis], place[f"{axis}_size"] = read(f"{axis}_rank", 0), read(f"{axis}_size", 1)
    replica, groups = read("dp_rank", replica), read("attn_dp_size", 1)
    # Under attention DP, dp_rank is that of the attention group or unset, as the controller passes it on.
    place["dp"] = read("attn_dp_rank", 0) if groups > 1 else replica
    place["dp_size"] = groups if groups > 1 else read("dp_size", replicas)
    world = place["tp_size"] * place["pp_size"]
    place["rank"] = (0 if groups > 1 else replica * world) + place["pp"] * place["tp_size"] + place["tp"]
    place["world_size"] = world * (1 if groups > 1 else place["dp_size"])
    return place


def _looked_up() -> Callable[[str], Any]:
    from sglang.srt.runtime_context import get_parallel

    return lambda name: getattr(get_parallel(), name)


def _asked() -> Callable[[str], Any]:
    """The same where only functions know (``distributed/parallel_state.py``, ``layers/dp_attention.py``)."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers import dp_attention

    functions = {
        "tp_rank": parallel_state.get_tensor_model_parallel_rank,
        "tp_size": parallel_state.get_tensor_model_parallel_world_size,
        "pp_rank": parallel_state.get_pipeline_model_parallel_rank,
        "pp_size": parallel_state.get_pipeline_model_parallel_world_size,
        "attn_tp_rank": dp_attention.get_attention_tp_rank,
        "attn_tp_size": dp_attention.get_attention_tp_size,
        "attn_dp_rank": dp_attention.get_attention_dp_rank,
        "attn_dp_size": dp_attention.get_attention_dp_size,
    }
    return lambda name: functions[name]()


def replica_of(scheduler: Any) -> int:
    """Which whole replica a scheduler serves, as it says up to 0.5.15 (``managers/scheduler.py``)."""
    said = (getattr(holder, "dp_rank", None) for holder in (scheduler, getattr(scheduler, "ps", None)))
    return next((rank for rank in said if isinstance(rank, int)), 0)


def layers_of(runners: Sequence[Any]) -> dict[str, int]:
    """Which decoder layers of the target this process runs: ``first_layer`` up to ``end_layer``."""
    for runner in runners:
        found = {} if runner.is_draft_worker else layers_of_model(runner.model)
        if found:
            return found
    return {}


def layers_of_model(model: torch.nn.Module) -> dict[str, int]:
    """The same of one model; nothing where it does not say."""
    inner = getattr(model, "model", None)
    first, end = (getattr(inner, name, None) for name in ("start_layer", "end_layer"))
    if isinstance(first, int) and isinstance(end, int):
        return {"first_layer": first, "end_layer": end}
    return {}


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
        "experts": experts_of(config),
        "config_sha256": hashlib.sha256(text.read_bytes()).hexdigest() if text.is_file() else None,
    }


def _draft_of(runner: Any) -> dict[str, Any]:
    config = runner.model_config.hf_config
    eagle = getattr(config, "eagle_config", None)
    eagle = dict(eagle) if isinstance(eagle, dict) else {}
    return {
        **_config_of(runner),
        "config": _plain({name: getattr(config, name) for name in DRAFT_KEYS if hasattr(config, name)}),
        "eagle_config": eagle,
        "aux_layer_ids": eagle.get("eagle_aux_hidden_state_layer_ids"),
    }


def arguments_of(server_args: Any) -> dict[str, Any]:
    """What SGLang's ``ServerArgs`` (a dataclass, later a msgspec Struct) was given, without secrets."""
    names = getattr(server_args, "__struct_fields__", None) or vars(server_args)
    values = {name: getattr(server_args, name) for name in names}
    return _plain(
        {
            name: value
            for name, value in values.items()
            if not (name.startswith("_") or value is None or any(word in name for word in SECRET_WORDS))
        }
    )


def _plain(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What JSON can hold as it is, the rest as text."""
    kept: dict[str, Any] = {}
    for name, value in facts.items():
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
            facts["server_args"] = arguments_of(runner.server_args)
    return facts
