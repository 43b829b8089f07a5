"""CK4xx: vocabularies, and the map from the draft's tokens to the target's."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from hsprobe.check.files import Stored, numbers
from hsprobe.check.model import Said, Severity, rule
from hsprobe.check.setup import Setup
from hsprobe.check.wording import shape

_LOADER = "sglang/srt/models/llama_eagle3.py LlamaForCausalLMEagle3.load_weights (0.5.23)"
_MAP = "https://github.com/NVIDIA-NeMo/Automodel/pull/2447"
_EMBED = "sglang/srt/speculative/eagle_worker_v2.py (0.5.23), https://github.com/vllm-project/vllm/pull/28549"

# A handful of tokens may well have no neighbours among them.
_FEW = 16


def _tensor(setup: Setup, name: str) -> Stored | None:
    """As SGLang finds it: by a part of the name."""
    found = (stored for stored in setup.draft_weights.tensors.values() if name in stored.name)
    return next(found, None)


def _offsets(setup: Setup) -> NDArray[np.int64] | None:
    """d2t: target id minus draft id. [V] int64"""
    stored = _tensor(setup, "d2t")
    return numbers(stored) if stored is not None and len(stored.shape) == 1 else None


def _draft_vocab(setup: Setup) -> int | None:
    return setup.draft.integer("draft_vocab_size") or setup.draft.integer("vocab_size")


@rule(
    "CK401",
    "VOCAB_SIZE",
    Severity.WARNING,
    summary="the draft's vocab_size is not the target's",
    why="vocab_size is that of the embedding, which SGLang takes from the target; the draft's own "
    "vocabulary is draft_vocab_size. A difference hints at a draft of another target, and an embedding in "
    "its file does not load.",
    mend="Set vocab_size to the target's, and keep the draft's own in draft_vocab_size.",
    sources=(_EMBED,),
)
def vocab_size(setup: Setup) -> Iterator[Said]:
    """The two vocab_size."""
    own, theirs = setup.draft.integer("vocab_size"), setup.target.integer("vocab_size")
    if own is not None and theirs is not None and own != theirs and setup.is_eagle3:
        yield Said(
            f"the draft's vocab_size is {own}, the target's {theirs}",
            change=f"vocab_size: {own}  ->  {theirs}",
        )


@rule(
    "CK402",
    "NO_D2T",
    Severity.ERROR,
    summary="the draft has a smaller vocabulary and no map to the target's",
    why="Without d2t SGLang takes the draft's token ids for the target's: nearly all proposals are other "
    "tokens.",
    mend="Write the map into the checkpoint as d2t, int64: target id minus draft id, one for each draft "
    "token.",
    sources=(_MAP, _LOADER),
)
def no_d2t(setup: Setup) -> Iterator[Said]:
    """draft_vocab_size below the target's and no d2t."""
    size, theirs = setup.draft.integer("draft_vocab_size"), setup.target.integer("vocab_size")
    known = setup.draft_weights.readable and setup.is_eagle3
    if known and size is not None and theirs is not None and size < theirs and _tensor(setup, "d2t") is None:
        yield Said(
            f"draft_vocab_size is {size}, the target has {theirs} tokens, and the checkpoint has no d2t"
        )


@rule(
    "CK403",
    "D2T_SHAPE",
    Severity.ERROR,
    summary="d2t is not a list of draft_vocab_size integers",
    why="SGLang looks every drafted token up in d2t: a shorter one is read out of bounds, a longer one "
    "belongs to another vocabulary.",
    mend="Write d2t with one integer for each draft token.",
    sources=(_LOADER,),
)
def d2t_shape(setup: Setup) -> Iterator[Said]:
    """Shape and element type of d2t."""
    stored, size = _tensor(setup, "d2t"), _draft_vocab(setup)
    if stored is None:
        return
    if stored.dtype not in ("I64", "I32"):
        yield Said(f"d2t is {stored.dtype}, not I64")
    if len(stored.shape) != 1 or (size is not None and stored.shape[0] != size):
        yield Said(f"d2t has the shape {shape(stored.shape)}, and the draft has {size} tokens")


@rule(
    "CK404",
    "D2T_RANGE",
    Severity.ERROR,
    summary="d2t leads to token ids that the target does not have",
    why="d2t holds offsets: the target's id is the draft's id plus d2t. One that holds the target's ids "
    "themselves leads past the end of the vocabulary, or to other tokens.",
    mend="Write offsets: d2t[i] = target id - i.",
    sources=(_MAP, _LOADER),
)
def d2t_range(setup: Setup) -> Iterator[Said]:
    """i + d2t[i] within the target's vocabulary."""
    offsets, theirs = _offsets(setup), setup.target.integer("vocab_size")
    if offsets is None or theirs is None:
        return
    tokens = offsets + np.arange(len(offsets))
    outside = np.flatnonzero((tokens < 0) | (tokens >= theirs))
    if len(outside):
        at = int(outside[0])
        looks = "; it looks like the target's ids themselves" if _looks_absolute(offsets, theirs) else ""
        yield Said(
            f"d2t[{at}] is {int(offsets[at])}, which leads to token {int(tokens[at])} of {theirs} "
            f"({len(outside)} such of {len(tokens)}){looks}"
        )


@rule(
    "CK405",
    "D2T_VALUES",
    Severity.ERROR,
    summary="d2t is no one-to-one map that keeps the order",
    why="Maps are made by counting tokens and sorting, so draft ids and target ids ascend together. Two "
    "draft tokens that lead to one target token, or ids that fall, are a sign of a damaged or absolute "
    "map.",
    mend="Write offsets: d2t[i] = target id - i, with the target ids in ascending order.",
    sources=(_MAP,),
)
def d2t_values(setup: Setup) -> Iterator[Said]:
    """Duplicates, falls, and maps that were filled in by default."""
    offsets, theirs = _offsets(setup), setup.target.integer("vocab_size")
    if offsets is None or len(offsets) < 2 or theirs is None:
        return
    count = len(offsets)
    tokens = offsets + np.arange(count)
    falls = np.flatnonzero(np.diff(tokens) <= 0)
    if ((tokens < 0) | (tokens >= theirs)).any():
        return
    if _looks_absolute(offsets, theirs):
        yield Said("d2t ascends as target ids do: it looks like the target's ids themselves, not offsets")
    elif len(np.unique(tokens)) < count:
        twice = count - len(np.unique(tokens))
        yield Said(f"{twice} of {count} draft tokens lead to a target token that another has")
    elif len(falls):
        yield Said(f"the target ids fall at draft token {int(falls[0]) + 1}", severity=Severity.WARNING)
    elif count < theirs and not offsets.any():
        yield Said(
            f"d2t is all zeros: the draft can only propose the target's first {count} tokens of {theirs}",
            severity=Severity.WARNING,
        )


def _looks_absolute(offsets: NDArray[np.int64], vocabulary: int) -> bool:
    """Whether they ascend strictly in the vocabulary: offsets repeat where neighbours are both kept."""
    if len(offsets) < _FEW:
        return False
    return bool(np.all(np.diff(offsets) > 0)) and int(offsets[0]) >= 0 and int(offsets[-1]) < vocabulary


@rule(
    "CK406",
    "T2D_MISMATCH",
    Severity.WARNING,
    summary="t2d does not mark the tokens that d2t leads to",
    why="SGLang does not read t2d, but both are written together: where they disagree, one of them is "
    "from another run or another vocabulary.",
    mend="Write d2t and t2d anew from the map that the draft was trained with.",
    sources=(_MAP, _LOADER),
)
def t2d_mismatch(setup: Setup) -> Iterator[Said]:
    """Length, count and set of t2d."""
    stored, offsets, theirs = _tensor(setup, "t2d"), _offsets(setup), setup.target.integer("vocab_size")
    if stored is None or offsets is None or len(stored.shape) != 1:
        return
    marks = numbers(stored)
    if theirs is not None and stored.shape[0] != theirs:
        yield Said(f"t2d has {stored.shape[0]} entries, and the target has {theirs} tokens")
        return
    if marks is None or stored.dtype != "BOOL":
        return
    marked = np.flatnonzero(marks)
    tokens = np.sort(offsets + np.arange(len(offsets)))
    if len(marked) != len(tokens):
        yield Said(f"t2d marks {len(marked)} tokens, and d2t has {len(tokens)}")
    elif not np.array_equal(marked, tokens):
        differ = int(np.count_nonzero(~np.isin(tokens, marked)))
        yield Said(f"d2t leads to {differ} tokens that t2d does not mark")


@rule(
    "CK407",
    "DRAFT_VOCAB_KEY",
    Severity.ERROR,
    summary="the draft's config has no draft_vocab_size",
    why="SGLang reads the attribute without a default: the server stops with AttributeError.",
    mend="Set draft_vocab_size: the rows of lm_head.weight, or null to take the target's head.",
    sources=("sglang/srt/models/llama_eagle3.py LlamaForCausalLMEagle3.__init__ (0.5.9, 0.5.23)",),
)
def draft_vocab_key(setup: Setup) -> Iterator[Said]:
    """The key must be there, null or a number."""
    if setup.draft.architecture != "LlamaForCausalLMEagle3" or "draft_vocab_size" in setup.draft.raw:
        return
    head = _tensor(setup, "lm_head.weight")
    value = str(head.shape[0]) if head is not None and head.shape else "null"
    yield Said("the draft's config has no draft_vocab_size", change=f"draft_vocab_size: not set  ->  {value}")


@rule(
    "CK408",
    "TIED_HEAD",
    Severity.ERROR,
    summary="tie_word_embeddings makes the target's embedding the draft's head",
    why="With tie_word_embeddings the draft's head is its embedding, which SGLang replaces by the "
    "target's: the checkpoint's lm_head is ignored, and the logits have the target's vocabulary.",
    mend="Set tie_word_embeddings to false.",
    sources=("sglang/srt/models/llama_eagle3.py LlamaForCausalLMEagle3.__init__ (0.5.23)",),
)
def tied_head(setup: Setup) -> Iterator[Said]:
    """Tied, though it has a head or a vocabulary of its own."""
    if not (setup.is_eagle3 and setup.draft.flag("tie_word_embeddings")):
        return
    head = _tensor(setup, "lm_head.weight")
    size, theirs = setup.draft.integer("draft_vocab_size"), setup.target.integer("vocab_size")
    if head is not None or (size is not None and theirs is not None and size != theirs):
        what = f"an lm_head.weight {shape(head.shape)}" if head is not None else f"draft_vocab_size {size}"
        yield Said(
            f"tie_word_embeddings is true, and the draft has {what} of its own",
            change="tie_word_embeddings: true  ->  false",
        )


@rule(
    "CK409",
    "EMBEDDING_REPLACED",
    Severity.NOTE,
    summary="the draft's own token embedding is replaced by the target's",
    why="For EAGLE-3 SGLang shares the target's embedding with the draft, whatever the checkpoint holds. "
    "A draft that trained its embedding then sees another one.",
    mend="Train the draft with the target's embedding frozen.",
    sources=(_EMBED, "https://github.com/vllm-project/vllm/pull/28549"),
)
def embedding_replaced(setup: Setup) -> Iterator[Said]:
    """An embedding in the file that will not be used."""
    stored = _tensor(setup, "embed_tokens.weight")
    given = setup.draft.integer("target_hidden_size")
    shared = given is None or given == setup.draft.hidden_size
    if setup.is_eagle3 and stored is not None and shared:
        yield Said(f"the draft's embed_tokens.weight {shape(stored.shape)} is replaced by the target's")


@rule(
    "CK410",
    "EMBEDDING_MISSING",
    Severity.ERROR,
    summary="the draft needs a token embedding of its own and has none",
    why="Where target_hidden_size differs from the draft's hidden_size, SGLang cannot share the target's "
    "embedding and keeps the draft's: without one in the checkpoint it is uninitialised memory.",
    mend="Write embed_tokens.weight into the draft's checkpoint.",
    sources=(
        "sglang/srt/models/llama.py LlamaForCausalLM.set_embed (0.5.23)",
        "https://github.com/wtdcode/vllm-backport/pull/50",
    ),
)
def embedding_missing(setup: Setup) -> Iterator[Said]:
    """Other width than the target and no embedding in the file."""
    given, own = setup.draft.integer("target_hidden_size"), setup.draft.hidden_size
    if (
        not setup.is_eagle3
        or given is None
        or own is None
        or given == own
        or not setup.draft_weights.readable
    ):
        return
    if _tensor(setup, "embed_tokens.weight") is None:
        yield Said(
            f"the draft is {own} wide and its target {given}: it needs an embed_tokens.weight of its own, "
            "and has none"
        )
