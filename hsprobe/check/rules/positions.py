"""CK5xx: RoPE, how far positions go, and the attention window."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hsprobe.check.config import Config, shown
from hsprobe.check.model import Said, Severity, rule
from hsprobe.check.setup import Setup
from hsprobe.check.wording import plain

_CONTEXT = (
    "sglang/srt/configs/model_config.py ModelConfig._derive_context_length (0.5.9, 0.5.15.post1, 0.5.23)"
)
_ROPE = "sglang/srt/models/llama.py LlamaDecoderLayer.__init__ (0.5.9, 0.5.23)"
_NEW_TRANSFORMERS = (0, 5, 10, 1)
"""First version that runs on transformers 5, which knows `rope_parameters`."""
_DEFAULT_THETA = 10000.0


@rule(
    "CK501",
    "ROPE_BASE",
    Severity.WARNING,
    summary="the draft's RoPE base is not the target's, or not given",
    why="The base must be the one that the draft was trained with. Trainers that do not read it train "
    "with 10000 whatever the config says, so neither value is wrong by itself; the error grows with the "
    "position.",
    mend="Set rope_theta to the base with which the draft was trained.",
    sources=("https://github.com/sgl-project/SpecForge/issues/265", _ROPE),
)
def rope_base(setup: Setup) -> Iterator[Said]:
    """The bases of the two models."""
    if not _own_layers(setup):
        return
    own, theirs = setup.draft.rope_theta, setup.target.rope_theta
    if own is None and theirs is not None and theirs != _DEFAULT_THETA:
        yield Said(
            f"the draft's config has no rope_theta, so it is {plain(_DEFAULT_THETA)}; the target's is "
            f"{plain(theirs)}",
            change=f"rope_theta: not set  ->  {plain(theirs)}",
            mend=(
                "Set rope_theta to the base of the draft's training: "
                f"{plain(theirs)} if it was the target's.",
            ),
        )
    elif own is not None and own != (theirs or _DEFAULT_THETA):
        yield Said(f"the draft's rope_theta is {plain(own)}, the target's {plain(theirs or _DEFAULT_THETA)}")


@rule(
    "CK502",
    "ROPE_SCALING",
    Severity.WARNING,
    summary="the draft's RoPE scaling is not the target's",
    why="A scaling that one side has and the other lacks turns the draft's queries and keys by other "
    "angles than in training. It must be the one that the draft was trained with.",
    mend="Set rope_scaling to that of the draft's training.",
    sources=("https://github.com/sgl-project/SpecForge/issues/265", _ROPE),
)
def rope_scaling(setup: Setup) -> Iterator[Said]:
    """The scalings of the two models."""
    if not _own_layers(setup):
        return
    own, theirs = _scaling(setup.draft), _scaling(setup.target)
    if own != theirs:
        yield Said(f"the draft's RoPE scaling is {_told(own)}, the target's {_told(theirs)}")


def _scaling(config: Config) -> dict[str, Any]:
    kept = {k: v for k, v in config.rope.items() if v is not None}
    return {} if kept.get("rope_type") == "default" and len(kept) == 1 else kept


def _told(scaling: dict[str, Any]) -> str:
    return shown(scaling, 100) if scaling else "none"


@rule(
    "CK503",
    "CONTEXT_LENGTH",
    Severity.ERROR,
    summary="the draft's positions end before the target's",
    why="SGLang gives the draft the target's context length and stops at start where the draft's "
    "max_position_embeddings is smaller. With SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 it runs, on "
    "positions that the draft may never have seen.",
    mend="Set max_position_embeddings to the target's if the draft was trained with RoPE that reaches "
    "there; else serve with --context-length of what it was trained on.",
    sources=(_CONTEXT, "https://github.com/sgl-project/sglang/issues/6783"),
)
def context_length(setup: Setup) -> Iterator[Said]:
    """Context lengths as SGLang derives them."""
    own, theirs = _context(setup.draft), _context(setup.target)
    if setup.captured.algorithm in ("DFLASH", "DSPARK"):
        return
    if theirs is not None and own is not None and own < theirs:
        key = setup.draft.integer("max_position_embeddings")
        yield Said(
            f"the draft's context ends at {own} tokens, the target's at {theirs}: SGLang refuses to start",
            change=f"max_position_embeddings: {key or 'not set'}  ->  {theirs}",
        )


def _context(config: Config) -> int | None:
    """As `get_context_length`: the first of its keys, times a scaling that says nothing of the original."""
    # transformers 5 gives rope_parameters under the old name too.
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    factor = 1.0
    if isinstance(scaling, dict):
        own = scaling.get("factor", 1)
        unscaled = "original_max_position_embeddings" in scaling or scaling.get("rope_type") == "llama3"
        factor = float(own) if isinstance(own, int | float) and 0 < own < 1e6 and not unscaled else 1.0
    for key in (
        "max_sequence_length",
        "seq_length",
        "max_seq_len",
        "model_max_length",
        "max_position_embeddings",
    ):
        found = config.integer(key)
        if found is not None:
            return int(factor * found)
    return None


@rule(
    "CK504",
    "ROPE_PARAMETERS",
    Severity.ERROR,
    summary="the draft's RoPE settings stand where this version does not read them",
    why="transformers 5 writes rope_parameters; SGLang 0.5.9 runs on transformers 4 and reads rope_theta "
    "and rope_scaling at the top, taking 10000 where they are missing. Where both are given and differ, "
    "the version decides which holds.",
    mend="Give rope_theta and rope_scaling at the top too, with the same values.",
    sources=("https://github.com/NVIDIA-NeMo/Automodel/pull/2920", _ROPE),
)
def rope_parameters(setup: Setup) -> Iterator[Said]:
    """Nested settings in an old version, or two that contradict each other."""
    nested, top = setup.draft.get("rope_parameters"), setup.draft.number("rope_theta")
    inner = nested.get("rope_theta") if isinstance(nested, dict) else None
    if not isinstance(inner, int | float) or isinstance(inner, bool):
        return
    if top is None and setup.number < _NEW_TRANSFORMERS and inner != _DEFAULT_THETA:
        yield Said(
            f"the draft's RoPE base {plain(inner)} stands in rope_parameters, and SGLang {setup.version} "
            f"takes {plain(_DEFAULT_THETA)}",
            change=f"rope_theta: not set  ->  {plain(inner)}",
        )
    elif top is not None and top != inner:
        used = plain(inner) if setup.number >= _NEW_TRANSFORMERS else plain(top)
        yield Said(
            f"rope_theta is {plain(top)} and rope_parameters.rope_theta is {plain(inner)}; SGLang "
            f"{setup.version} takes {used}",
            severity=Severity.WARNING,
        )


@rule(
    "CK505",
    "WINDOW_IGNORED",
    Severity.WARNING,
    summary="the draft's sliding window is not read",
    why="An EAGLE-3 draft attends to everything unless the server is started with "
    "--speculative-draft-window-size: a draft trained with a window is exact up to it and drifts beyond.",
    mend="Serve with --speculative-draft-window-size and the window of the draft's training.",
    sources=(
        "https://github.com/vllm-project/speculators/pull/684",
        "sglang/srt/models/llama_eagle3.py get_attention_sliding_window_size (0.5.23)",
    ),
)
def window_ignored(setup: Setup) -> Iterator[Said]:
    """A window in the config of an EAGLE-3 draft."""
    window = setup.draft.integer("sliding_window")
    off = setup.draft.get("use_sliding_window") is False
    if setup.is_eagle3 and window is not None and not off:
        told = f"--speculative-draft-window-size {window}"
        late = setup.number < (0, 5, 12, 1)
        yield Said(
            f"the draft's sliding_window is {window}, and SGLang does not read it",
            mend=("SGLang of this version has no way to give the draft a window.",)
            if late
            else (f"Serve with {told} if the draft was trained with it.",),
        )


def _own_layers(setup: Setup) -> bool:
    """Whether the draft has Llama layers of its own; MTP heads are a part of the target."""
    return setup.is_eagle3 or setup.algorithm == "EAGLE"
