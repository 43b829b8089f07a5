"""CK6xx: norms before fc, in the layer and at its end, and biases: flags in the config against tensors."""

from __future__ import annotations

from collections.abc import Iterator

from hsprobe.check.layout import (
    MULTI_LAYER,
    NORM_BEFORE_FC,
    asks_norm_before_fc,
    canonical,
    known_layout,
    norm_before_fc,
    output_bias,
    per_chunk_norms,
)
from hsprobe.check.model import Said, Severity, rule
from hsprobe.check.setup import Setup

_DRAFT = "sglang/srt/models/llama_eagle3.py (0.5.9, 0.5.15.post1, 0.5.23)"
_SPECULATORS = "https://github.com/vllm-project/vllm/pull/38111"


def _names(setup: Setup) -> set[str]:
    return {canonical(setup, name) for name in setup.draft_weights.named}


@rule(
    "CK601",
    "NORM_BEFORE_FC",
    Severity.ERROR,
    summary="the norm over all chunks before fc is not applied, or has no weight",
    why="input_norm.weight is left out without a word where norm_before_fc is not set, and in versions "
    "that do not know it: fc is handed vectors of another scale than in training.",
    mend='Set "norm_before_fc": true in eagle_config, and use SGLang 0.5.18 or later.',
    sources=("https://github.com/sgl-project/sglang/pull/32334", _SPECULATORS, _DRAFT),
)
def before_fc(setup: Setup) -> Iterator[Said]:
    """Flag, weight and version."""
    if not setup.is_eagle3:
        return
    stored = "input_norm.weight" in _names(setup)
    asked = asks_norm_before_fc(setup)
    if stored and not asked:
        yield Said(
            "the checkpoint has input_norm.weight, and norm_before_fc is not set: the norm is left out",
            change="eagle_config.norm_before_fc: not set  ->  true",
        )
    elif asked and not setup.since(*NORM_BEFORE_FC):
        yield Said(
            f"norm_before_fc is set, and SGLang {setup.version} does not know it: the norm is left out",
            mend=("Use SGLang 0.5.18 or later.",),
        )
    elif norm_before_fc(setup) and setup.draft_weights.readable and not stored:
        yield Said(
            "norm_before_fc is set, and the checkpoint has no input_norm.weight: all its weights are one",
            mend=("Set norm_before_fc to false, or export the weight.",),
        )


@rule(
    "CK602",
    "NORM_PER_CHUNK",
    Severity.ERROR,
    summary="the norms of the single chunks before fc are not applied, or have no weights",
    why="fc_norm (aux_norm_low, _mid and _high in older files) is left out without a word where neither "
    "fc_norm nor use_aux_norm is set, and in versions before 0.5.12.",
    mend='Set "fc_norm": true at the top of the draft\'s config, and use SGLang 0.5.12 or later.',
    sources=("https://github.com/vllm-project/vllm/pull/43482", _DRAFT),
)
def per_chunk(setup: Setup) -> Iterator[Said]:
    """Flag, weights and version."""
    if not setup.is_eagle3:
        return
    stored = any(name.startswith(("fc_norm.", "aux_norm_")) for name in _names(setup))
    asked = setup.draft.flag("fc_norm") or setup.draft.flag("use_aux_norm")
    nested = any(setup.draft.part("eagle_config").get(key) for key in ("fc_norm", "use_aux_norm"))
    if asked and not setup.since(*MULTI_LAYER):
        yield Said(
            f"fc_norm is set, and SGLang {setup.version} does not know it: the norms are left out",
            mend=("Use SGLang 0.5.12 or later.",),
        )
    elif not asked and (stored or nested):
        where = "it stands in eagle_config, where it is not read" if nested else "fc_norm is not set"
        yield Said(
            f"the draft has norms for the single chunks, and {where}: they are left out",
            change="fc_norm: not set  ->  true",
        )
    elif per_chunk_norms(setup) and setup.draft_weights.readable and not stored:
        yield Said(
            "fc_norm is set, and the checkpoint has no fc_norm weights: all of them are one",
            mend=("Set fc_norm to false, or export the weights.",),
        )


@rule(
    "CK603",
    "NORM_OUTPUT",
    Severity.ERROR,
    summary="the state that the draft hands to its own next step is not normed as in training",
    why="With norm_output the draft feeds itself its state after the final norm, without it the one "
    "before. Versions before 0.5.12 do not know the flag; it is read at the top of the config alone.",
    mend="Give norm_output at the top of the draft's config, as in training, and use SGLang 0.5.12 or later.",
    sources=("https://github.com/sgl-project/SpecForge/pull/879", _DRAFT),
)
def norm_output(setup: Setup) -> Iterator[Said]:
    """The flag in a version or a place where it is not read."""
    if not setup.is_eagle3:
        return
    if setup.draft.flag("norm_output") and not setup.since(*MULTI_LAYER):
        yield Said(
            f"norm_output is set, and SGLang {setup.version} does not know it",
            mend=("Use SGLang 0.5.12 or later.",),
        )
    elif setup.draft.part("eagle_config").get("norm_output") and not setup.draft.flag("norm_output"):
        yield Said(
            "norm_output stands in eagle_config, where SGLang does not read it",
            change="norm_output: not set  ->  true",
        )


@rule(
    "CK604",
    "NORM_BEFORE_RESIDUAL",
    Severity.ERROR,
    summary="the draft was trained with norm_before_residual, which SGLang does not implement",
    why="speculators can take the layer's residual after its hidden_norm. SGLang always takes it before, "
    "so the layer's output is another.",
    mend="Train the draft with norm_before_residual false.",
    sources=(_SPECULATORS, "sglang/srt/models/llama_eagle3.py LlamaDecoderLayer.forward (0.5.23)"),
)
def norm_before_residual(setup: Setup) -> Iterator[Said]:
    """The flag of speculators."""
    nested = setup.draft.part("eagle_config").get("norm_before_residual")
    if setup.is_eagle3 and (setup.draft.flag("norm_before_residual") or nested):
        yield Said("norm_before_residual is set, and SGLang takes the residual before the norm")


@rule(
    "CK605",
    "BIAS_IGNORED",
    Severity.ERROR,
    summary="biases of the draft are not loaded",
    why="SGLang builds the query, key and value projections and the MLP of an EAGLE-3 draft without "
    "biases and leaves theirs out without a word. The bias of fc is loaded where `bias` is set.",
    mend="Train the draft without these biases.",
    sources=("sglang/srt/models/llama_eagle3.py LlamaDecoderLayer.__init__ (0.5.23)",),
)
def bias_ignored(setup: Setup) -> Iterator[Said]:
    """Biases in the checkpoint that have no place."""
    if not known_layout(setup):
        return
    parts = ["q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "down_proj", "gate_up_proj"]
    parts += [] if output_bias(setup) else ["o_proj"]
    found = sorted(
        n for n in setup.draft_weights.named if n.endswith(tuple(f".{part}.bias" for part in parts))
    )
    if found:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        yield Said(f"{found[0]}{more} will not be loaded")
    if "fc.bias" in _names(setup) and not setup.draft.flag("bias"):
        yield Said(
            "fc.bias will not be loaded: bias is not set",
            change="bias: not set  ->  true",
            mend=("Store a bias of zeros for self_attn.o_proj too: with `bias` SGLang builds one.",),
        )
