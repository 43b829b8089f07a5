"""Run the id setters of the installed SGLang's model classes on minimal instances.

An instance is of the real class, without its `__init__`: it has only what the setters touch. Its inner model
is one too, of the class that the real one builds, with plain layers.
"""

import importlib
import inspect
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hsprobe.fixtures.cpu.placeholders import Placeholder
from hsprobe.formats.sglang_models import FILES

LAYERS = 12
SETTERS = {"EAGLE3": "set_eagle3_layers_to_capture", "DFLASH": "set_dflash_layers_to_capture"}
CASES: dict[str, list[int] | None] = {
    "outputs": [1, 5, 8],
    "inputs": [2, 6, 9],
    "embedding": [-1, 5, 8],
    "zero": [0, 5, 8],
    "unsorted": [8, 2, 5],
    "last layer": [2, 6, 11],
    "boundary": [2, 6, 12],
    "default": None,
}
# The class of the inner model, where its own setter or its kind of layers matters: (file, class).
INNER = {
    "qwen2_moe": ("qwen2_moe", "Qwen2MoeModel"),
    "qwen3_moe": ("qwen3_moe", "Qwen3MoeModel"),
    "qwen3_next": ("qwen3_next", "Qwen3NextModel"),
    "qwen3_5_text": ("qwen3_5", "Qwen3_5ForCausalLM"),
    "qwen3_5": ("qwen3_5", "Qwen3_5ForCausalLM"),
    "Qwen3VLForConditionalGeneration": ("qwen3_vl", "Qwen3LLMModel"),
    "InternS1ProForConditionalGeneration": ("qwen3_vl", "Qwen3LLMModel"),
    "Qwen3VLMoeForConditionalGeneration": ("qwen3_vl_moe", "Qwen3MoeLLMModel"),
    "lfm2": ("lfm2", "Lfm2Model"),
    "lfm2_moe": ("lfm2_moe", "Lfm2MoeModel"),
}
# What a class that passes the ids on builds as its language model.
LANGUAGE = {
    "kimi_k25": ("deepseek_v2", "DeepseekV3ForCausalLM"),
    "gemma3_mm": ("gemma3_causal", "Gemma3ForCausalLM"),
    "mllama4": ("llama4", "Llama4ForCausalLM"),
    "lfm2_vl": ("lfm2", "Lfm2ForCausalLM"),
}
# Classes that inherit the setter of the table's file and are defined in another.
DEFINED = {
    "Llama4ForCausalLM": "llama4",
    "Ministral3ForCausalLM": "ministral3",
    "MistralForCausalLM": "mistral",
    "TeleFLMForCausalLM": "teleflm",
    "MellumForCausalLM": "mellum",
    "InternS1ProForConditionalGeneration": "interns1pro",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe",
    "GlmMoeDsaForCausalLM": "glm4_moe",
    "MistralLarge3ForCausalLM": "mistral_large_3",
    "SarvamMoEForCausalLM": "sarvam_moe",
    "Gemma4UnifiedForConditionalGeneration": "gemma4_unified",
    "MuseSparkForConditionalGeneration": "muse_spark_omni",
}
UNIMPORTABLE = "its file cannot be imported on a CPU: "
GROUP = types.SimpleNamespace(is_last_rank=True, world_size=1)


def name_missing_kernels() -> None:
    """Name the kernels that some model files look up on import and that the stand-ins lack."""
    # Only where the stand-ins are in its place can it be imported.
    import sgl_kernel

    sgl_kernel.__getattr__ = Placeholder("sgl_kernel").__getattr__
    for name in KERNELS:
        if not hasattr(torch.ops.sgl_kernel, name):
            NAMED.define(f"{name}(Tensor a, Tensor b) -> Tensor")


KERNELS = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)
NAMED = torch.library.Library("sgl_kernel", "FRAGMENT")


def _class(file: str, name: str) -> Any:
    return getattr(importlib.import_module(f"sglang.srt.models.{DEFINED.get(name, file)}"), name)


def _bare(cls: Any) -> Any:
    made = cls.__new__(cls)
    nn.Module.__init__(made)
    return made


def _config() -> types.SimpleNamespace:
    config = types.SimpleNamespace(num_hidden_layers=LAYERS)
    config.text_config = config
    return config


def _inner(cls: Any) -> Any:
    made = _bare(cls)
    made.layers = nn.ModuleList(nn.Identity() for _ in range(LAYERS))
    made.layers_to_capture = []
    made.pp_group = GROUP
    return made


def instance(file: str, name: str) -> tuple[Any, Any]:
    """(an instance of the class, the module in which it leaves the layers to capture)."""
    cls = _class(file, name)
    made = _bare(cls)
    home = inspect.getmodule(getattr(cls, SETTERS["EAGLE3"], cls))
    if hasattr(home, "get_parallel"):
        home.get_parallel = lambda: types.SimpleNamespace(pp_group=GROUP)  # type: ignore[union-attr]
    if hasattr(home, "get_pp_group"):
        home.get_pp_group = lambda: GROUP  # type: ignore[union-attr]
    config = _config()
    for attribute in ("pp_group", "config"):
        if not isinstance(getattr(cls, attribute, None), property):
            setattr(made, attribute, GROUP if attribute == "pp_group" else config)
    if file in LANGUAGE:
        made.language_model, inner = instance(*LANGUAGE[file])
        return made, inner
    wanted = INNER.get(name) or INNER.get(file)
    inner = _inner(_class(*wanted) if wanted else nn.Module)
    if file == "muse_spark":
        made.model = nn.Module()
        made.model.language_model = inner
    elif file == "gemma4_mm":
        made.language_model = inner
    else:
        made.model = inner
    return made, inner


def stored(inner: Any) -> list[int]:
    """The layers whose flag is set, else those in the list."""
    flagged = [k for k, layer in enumerate(inner.layers) if getattr(layer, "_is_layer_to_capture", False)]
    return flagged or sorted({int(k) for k in inner.layers_to_capture})


def _outcomes(file: str, name: str, setter: str) -> Iterator[tuple[str, Any]]:
    """(case, the layers stored, or the name of the exception)."""
    for case, ids in CASES.items():
        if ids is None and setter == SETTERS["DFLASH"]:
            continue
        made, inner = instance(file, name)
        try:
            getattr(made, setter)(ids)
        except Exception as error:
            yield case, type(error).__name__
        else:
            yield case, stored(inner)


def outcomes() -> dict[str, Any]:
    """Class -> algorithm -> case -> outcome; one that cannot be made -> why; one not there -> None."""
    name_missing_kernels()
    found: dict[str, Any] = {}
    for row in FILES:
        for name in row.classes:
            try:
                _class(row.file, name)
            except (ModuleNotFoundError, AttributeError):
                found[name] = None
                continue
            except (ImportError, AssertionError) as error:
                found[name] = f"{UNIMPORTABLE}{error}"
                continue
            try:
                made, _ = instance(row.file, name)
                found[name] = {
                    algorithm: dict(_outcomes(row.file, name, setter))
                    for algorithm, setter in SETTERS.items()
                    if hasattr(made, setter)
                }
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
    return found
