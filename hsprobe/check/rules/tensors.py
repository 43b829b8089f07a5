"""CK7xx: the draft's tensors against those that SGLang loads; dtype, quantisation, files."""

from __future__ import annotations

from collections.abc import Iterator

from hsprobe.check.layout import MULTI_LAYER, Expected, canonical, expected, fused, known_layout, quantized
from hsprobe.check.model import Said, Severity, rule
from hsprobe.check.setup import Setup
from hsprobe.check.wording import shape
from hsprobe.diagnose.naming import plural

_LOADER = (
    "sglang/srt/models/llama_eagle3.py LlamaForCausalLMEagle3.load_weights (0.5.9, 0.5.15.post1, 0.5.23)"
)
_DTYPE = "sglang/srt/configs/model_config.py _get_and_verify_dtype (0.5.9, 0.5.15.post1, 0.5.23)"
_MOST_NAMED = 3
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@rule(
    "CK701",
    "WEIGHTS_UNCHECKED",
    Severity.NOTE,
    summary="the draft's weights cannot be looked at",
    why="Only the headers of safetensors files are read. Pickled files (.bin, .pt) can run code when "
    "opened, so they are left alone, and what depends on tensors is not checked.",
    mend="Convert the draft to safetensors.",
    sources=("https://huggingface.co/docs/safetensors",),
)
def weights_unchecked(setup: Setup) -> Iterator[Said]:
    """No safetensors, or none at all."""
    held = setup.draft_weights
    if held.readable:
        return
    if held.missing:
        return
    if held.others:
        yield Said(
            f"the draft's weights are pickled ({held.others[0]}) and were not opened: tensors are not checked"
        )
    else:
        yield Said("the draft's folder holds no safetensors file: tensors are not checked")


@rule(
    "CK702",
    "FILES_MISSING",
    Severity.ERROR,
    summary="the index names weight files that are not there",
    why="SGLang stops at start, or loads what there is.",
    mend="Fetch the missing files.",
    sources=("sglang/srt/model_loader/weight_utils.py (0.5.23)",),
)
def files_missing(setup: Setup) -> Iterator[Said]:
    """Of either model."""
    for what, held in (("draft", setup.draft_weights), ("target", setup.target_weights)):
        if held.missing:
            more = f" and {len(held.missing) - 1} more" if len(held.missing) > 1 else ""
            yield Said(
                f"the {what}'s index names {held.missing[0]}{more}, which is not in its folder",
                severity=None if what == "draft" else Severity.WARNING,
            )


@rule(
    "CK703",
    "TENSOR_MISSING",
    Severity.ERROR,
    summary="tensors that SGLang's draft class needs are not in the checkpoint",
    why="A parameter that no tensor is loaded into keeps what it was made with: random numbers, or ones "
    "for a norm. Nothing is said.",
    mend="Export the draft with these names.",
    sources=(_LOADER,),
)
def tensor_missing(setup: Setup) -> Iterator[Said]:
    """Required tensors without a counterpart."""
    if not known_layout(setup):
        return
    held = {canonical(setup, name) for name in setup.draft_weights.named}
    plain = not quantized(setup)
    missing = [
        name
        for name, one in expected(setup).items()
        if one.required
        and name not in held
        and fused(name) not in held
        and (plain or not any(other.startswith(name.removesuffix("weight")) for other in held))
    ]
    # CK601, CK602 speak of these, CK704 of layers under a name that the version does not know.
    missing = [n for n in missing if not n.startswith(("fc_norm.", "input_norm."))]
    if misnamed_layers(setup):
        missing = [n for n in missing if not n.startswith("midlayer.")]
    if missing:
        yield Said(f"{plural(len(missing), 'tensor')} of the draft not in the checkpoint: {_some(missing)}")


@rule(
    "CK704",
    "LAYER_MISNAMED",
    Severity.ERROR,
    summary="the draft's layer has a name that this version does not load",
    why="Until 0.5.11 the layer must be called midlayer; layers.0 is left out without a word, and the "
    "draft runs with random weights. Later versions take either name.",
    mend="Rename layers.0 to midlayer in the checkpoint, or use SGLang 0.5.12 or later.",
    sources=(_LOADER,),
)
def layer_misnamed(setup: Setup) -> Iterator[Said]:
    """layers.0 in a version that only knows midlayer."""
    found = misnamed_layers(setup)
    if found:
        yield Said(f"SGLang {setup.version} loads midlayer.*, and the checkpoint has {_some(found)}")


def misnamed_layers(setup: Setup) -> list[str]:
    """Names of a layer that an old version leaves out."""
    if not known_layout(setup) or setup.since(*MULTI_LAYER):
        return []
    return sorted(n for n in setup.draft_weights.named if n.removeprefix("model.").startswith("layers."))


@rule(
    "CK705",
    "TENSOR_UNEXPECTED",
    Severity.WARNING,
    summary="the checkpoint has tensors that SGLang's draft class does not load",
    why="They are left out without a word: what they did in training does not happen in service.",
    mend="Find out what they are for; a draft that needs them cannot be served by this class.",
    sources=(_LOADER,),
)
def tensor_unexpected(setup: Setup) -> Iterator[Said]:
    """Names that lead nowhere."""
    if not known_layout(setup) or quantized(setup):
        return
    wanted = expected(setup)
    wanted |= {fused(name): one for name, one in expected(setup).items()}
    spoken_for = ("fc_norm.", "aux_norm_", "input_norm.", "midlayer.", "layers.")
    over = sorted(
        name
        for name in setup.draft_weights.named
        if canonical(setup, name) not in wanted
        and not ("d2t" in name or "t2d" in name or name.endswith((".bias", "rotary_emb.inv_freq")))
        and not (canonical(setup, name).startswith(spoken_for[:3]))
        and not (misnamed_layers(setup) and name.removeprefix("model.").startswith("layers."))
    )
    tied = setup.draft.flag("tie_word_embeddings")
    over = [name for name in over if not (tied and "lm_head" in name)]
    if over:
        yield Said(f"{plural(len(over), 'tensor')} of the checkpoint will not be loaded: {_some(over)}")


@rule(
    "CK706",
    "TENSOR_SHAPE",
    Severity.ERROR,
    summary="tensors have other shapes than the draft's config asks for",
    why="SGLang stops at start where a shape does not fit. A square matrix that was stored transposed "
    "fits and is wrong; it cannot be told from its shape.",
    mend="Export the draft anew, or correct the config.",
    sources=(_LOADER,),
)
def tensor_shape(setup: Setup) -> Iterator[Said]:
    """Shapes against the config, transposed ones by name."""
    if not known_layout(setup) or quantized(setup):
        return
    wanted = expected(setup)
    for name, stored in sorted(setup.draft_weights.tensors.items()):
        one = wanted.get(canonical(setup, name), Expected(None))
        if one.shape is None or stored.shape == one.shape:
            continue
        if len(one.shape) == 2 and stored.shape == one.shape[::-1]:
            yield Said(
                f"{name} is stored transposed: {shape(stored.shape)}, and SGLang loads {shape(one.shape)}",
                mend=(f"Store {name} transposed.",),
            )
        else:
            yield Said(f"{name} has the shape {shape(stored.shape)}; the config asks for {shape(one.shape)}")


@rule(
    "CK707",
    "DTYPE",
    Severity.ERROR,
    summary="the draft will run in another dtype than the target",
    why="With --dtype auto each model runs in the dtype of its own config, and float32 or none at all "
    "means float16. The target's states and the draft's fc then do not fit: the first draft pass raises "
    "an error, or rounds.",
    mend="Give the draft the target's dtype, or serve with --dtype.",
    sources=(_DTYPE, "https://github.com/vllm-project/vllm/issues/9534"),
)
def dtype(setup: Setup) -> Iterator[Said]:
    """As SGLang works it out from either config."""
    own, theirs = _served(setup.draft.dtype), _served(setup.target.dtype)
    if own == theirs or str(setup.target.raw.get("model_type", "")).startswith("gemma"):
        return
    given = setup.draft.dtype
    yield Said(
        f"the draft's config says {given or 'no dtype'}, so it runs in {own}; the target runs in {theirs}",
        change=f"torch_dtype: {given or 'not set'}  ->  {theirs}",
    )


def _served(given: str | None) -> str:
    return "float16" if given in (None, "float32") else str(given)


@rule(
    "CK708",
    "STORED_DTYPE",
    Severity.NOTE,
    summary="the draft's weights are stored in another dtype than they will run in",
    why="They are rounded when they are loaded. That is small against the states' own rounding, but it is "
    "not what was trained.",
    mend="Store the weights in the dtype in which they are served.",
    sources=(_DTYPE,),
)
def stored_dtype(setup: Setup) -> Iterator[Said]:
    """fc's dtype in the file against the config's."""
    fc = setup.draft_weights.tensors.get("fc.weight")
    stored = _DTYPES.get(fc.dtype) if fc is not None else None
    if stored is not None and stored != _served(setup.draft.dtype):
        yield Said(f"fc.weight is stored in {stored} and runs in {_served(setup.draft.dtype)}")


@rule(
    "CK709",
    "QUANT_CONFIG",
    Severity.ERROR,
    summary="the draft's weights are quantised and its config does not say how",
    why="Without quantization_config the bytes are loaded as plain numbers, without their scales: the "
    "first product is wrong by a factor a block, and nothing is accepted.",
    mend="Add the quantization_config of the export to the draft's config.json.",
    sources=("https://github.com/sgl-project/sglang/pull/32440",),
)
def quant_config(setup: Setup) -> Iterator[Said]:
    """8-bit weights without a quantization_config."""
    if setup.draft.part("quantization_config") or not setup.is_eagle3:
        return
    eight = [
        name
        for name, stored in setup.draft_weights.tensors.items()
        if name.endswith("weight") and stored.dtype in ("F8_E4M3", "F8_E5M2", "I8", "U8", "F4")
    ]
    if eight:
        yield Said(
            f"{_some(sorted(eight))} stored in 8 bits or less, and the config has no quantization_config"
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(name[:80] for name in names[:_MOST_NAMED]) + more
