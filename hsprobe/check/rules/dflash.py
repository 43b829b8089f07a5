"""CK9xx: drafts that are not EAGLE-3: DFlash and DSpark, MTP heads."""

from __future__ import annotations

from collections.abc import Iterator

from hsprobe.check.captured import DFLASH_KEY, EAGLE_KEY
from hsprobe.check.config import as_ids, shown
from hsprobe.check.model import Said, Severity, rule
from hsprobe.check.setup import Setup
from hsprobe.check.wording import shape
from hsprobe.diagnose.naming import plural
from hsprobe.formats.sglang_ids import DFLASH

_UTILS = (
    "sglang/srt/speculative/dflash_utils.py DFlashDraftConfig.resolve_target_layer_ids (0.5.15.post1, 0.5.23)"
)


@rule(
    "CK901",
    "DFLASH_RANGE",
    Severity.ERROR,
    summary="a DFlash id names a layer that the target does not have",
    why="The server stops at start. It is the usual sign of a draft of another target.",
    mend="Use the draft of this target.",
    sources=(_UTILS, "https://github.com/vllm-project/vllm/pull/48113"),
)
def dflash_range(setup: Setup) -> Iterator[Said]:
    """Ids outside 0..L-1."""
    found, layers = setup.captured, setup.target.num_layers
    if found.family != DFLASH or not found.ids or layers is None:
        return
    bad = [i for i in found.ids if not 0 <= i < layers]
    if bad:
        yield Said(f"{found.key} names {shown(bad)}, and the target has layers 0 to {layers - 1}")


@rule(
    "CK902",
    "DFLASH_WIDTH",
    Severity.ERROR,
    summary="a DFlash draft is not as wide as its target, or its fc takes another number of chunks",
    why="Its fc is built for as many chunks of the draft's own hidden size as there are ids. The server "
    "stops when the weight is loaded, or at the first draft pass.",
    mend="Use the draft of this target, with the ids of its training.",
    sources=("sglang/srt/models/dflash.py DFlashDraftModel.project_target_hidden (0.5.15.post1, 0.5.23)",),
)
def dflash_width(setup: Setup) -> Iterator[Said]:
    """Hidden sizes and fc.weight."""
    found, own, theirs = setup.captured, setup.draft.hidden_size, setup.target.hidden_size
    if found.family != DFLASH:
        return
    if own is not None and theirs is not None and own != theirs:
        yield Said(f"the draft is {own} wide, the target {theirs}")
    fc = setup.draft_weights.tensors.get("fc.weight")
    if fc is not None and found.ids and own is not None and fc.shape != (own, own * len(found.ids)):
        yield Said(
            f"fc.weight is {shape(fc.shape)}, and {plural(len(found.ids), 'id')} of width {own} need "
            f"{shape((own, own * len(found.ids)))}"
        )


@rule(
    "CK903",
    "DFLASH_TARGET",
    Severity.WARNING,
    summary="a DFlash draft was trained on a target with another number of layers",
    why="SGLang warns and goes on with the ids as they are, which are then layers of another model.",
    mend="Use the draft of this target.",
    sources=("sglang/srt/model_executor/model_runner_components/spec_aux_hidden_state.py (0.5.23)",),
)
def dflash_target(setup: Setup) -> Iterator[Said]:
    """num_target_layers of the draft against the target's layers."""
    layers = setup.target.num_layers
    if setup.captured.family != DFLASH or layers is None:
        return
    nested = setup.draft.part("dflash_config").get("num_target_layers")
    told = nested if nested is not None else setup.draft.raw.get("num_target_layers")
    if isinstance(told, int) and not isinstance(told, bool) and told != layers:
        yield Said(
            f"the draft's num_target_layers is {shown(told)}, and the target has {plural(layers, 'layer')}"
        )


@rule(
    "CK904",
    "TWO_CONVENTIONS",
    Severity.NOTE,
    summary="the config holds ids of two algorithms that name different depths",
    why="A DFlash id always names a layer's output. Under EAGLE3 some classes read ids as inputs, and "
    "vLLM counts depths: the same numbers are a layer apart from one algorithm to the other.",
    mend="Keep each list in the convention of its own algorithm.",
    sources=(
        "https://github.com/vllm-project/vllm/pull/40727",
        "https://github.com/microsoft/onnxruntime-genai/pull/2538",
    ),
)
def two_conventions(setup: Setup) -> Iterator[Said]:
    """Both lists in one config."""
    eagle = as_ids(setup.draft.part("eagle_config").get("eagle_aux_hidden_state_layer_ids"))
    dflash = as_ids(setup.draft.part("dflash_config").get("target_layer_ids"))
    if eagle and dflash:
        read = DFLASH_KEY if setup.captured.family == DFLASH else EAGLE_KEY
        yield Said(
            f"the config has {EAGLE_KEY} {eagle} and {DFLASH_KEY} {dflash}; {setup.algorithm} reads {read}"
        )


@rule(
    "CK905",
    "MTP_IDS",
    Severity.WARNING,
    summary="layer ids in the config of a draft that is handed the final state",
    why="MTP heads and EAGLE-1 drafts take the state after the last layer (after the final norm for most "
    "classes). SGLang does not look at ids for them.",
    mend="Serve with EAGLE3 if the draft was trained on several layers; else remove the ids.",
    sources=(
        "https://github.com/ModelTC/LightLLM/pull/1402",
        "sglang/srt/layers/logits_processor.py (0.5.23)",
    ),
)
def mtp_ids(setup: Setup) -> Iterator[Said]:
    """Ids that no one reads."""
    if setup.algorithm not in ("EAGLE", "NEXTN", "FROZEN_KV_MTP") or setup.is_eagle3:
        return
    ids = setup.draft.part("eagle_config").get("eagle_aux_hidden_state_layer_ids")
    if ids:
        yield Said(f"{EAGLE_KEY} is {shown(ids)}, and {setup.algorithm} hands over the final state")


@rule(
    "CK906",
    "MTP_HEAD",
    Severity.ERROR,
    summary="the draft config has no MTP layers",
    why="For NEXTN the draft is the checkpoint's own MTP layers, counted by num_nextn_predict_layers. "
    "Without them there is nothing to load.",
    mend="Give the folder of the checkpoint with its MTP layers, or another algorithm.",
    sources=("sglang/srt/configs/model_config.py ModelConfig._config_draft_model (0.5.23)",),
)
def mtp_head(setup: Setup) -> Iterator[Said]:
    """num_nextn_predict_layers of zero, where the class of a target is given as the draft."""
    if setup.algorithm != "NEXTN" or setup.is_eagle3:
        return
    given = setup.draft.get("num_nextn_predict_layers")
    if given == 0 and not isinstance(given, bool):
        yield Said(f"num_nextn_predict_layers is 0 in {setup.draft.path}")
