"""CK3xx: how wide what the draft is handed is, and how wide its fc is."""

from __future__ import annotations

from collections.abc import Iterator

from hsprobe.check.captured import EAGLE_KEY
from hsprobe.check.layout import MULTI_LAYER, chunks, width_in
from hsprobe.check.model import Said, Severity, rule
from hsprobe.check.setup import Setup
from hsprobe.check.wording import depth_list, shape
from hsprobe.diagnose.naming import plural

_DRAFT = "sglang/srt/models/llama_eagle3.py LlamaModel (0.5.9, 0.5.15.post1, 0.5.23)"


@rule(
    "CK301",
    "FC_CHUNKS",
    Severity.ERROR,
    summary="the draft's fc takes another number of chunks than the target hands over",
    why="The product of fc and the vector does not exist, so the first draft pass raises an error; with "
    "one chunk of the draft's own width, fc is skipped instead.",
    mend="Name as many layers as fc.weight has blocks of the target's hidden size.",
    sources=(_DRAFT, "https://github.com/sgl-project/sglang/pull/32334"),
)
def chunk_count(setup: Setup) -> Iterator[Said]:
    """fc.weight against the chunks that will be captured."""
    found, hidden = setup.captured, setup.target.hidden_size
    fc = setup.draft_weights.tensors.get("fc.weight") or setup.draft_weights.tensors.get("model.fc.weight")
    if found.depths is None or found.final or fc is None or len(fc.shape) != 2 or not hidden:
        return
    handed = len(found.depths) * hidden
    if fc.shape[1] != handed and fc.shape[0] != handed:
        blocks, rest = divmod(fc.shape[1], hidden)
        takes = plural(blocks, "chunk") if not rest else f"{fc.shape[1] / hidden:.2f} chunks"
        yield Said(
            f"fc.weight {shape(fc.shape)} takes {takes} of {hidden}, and the target hands over "
            f"{len(found.depths)}: depths {depth_list(found.depths)}"
        )


@rule(
    "CK302",
    "TARGET_HIDDEN_SIZE",
    Severity.ERROR,
    summary="the draft's target_hidden_size is not the target's hidden size",
    why="fc is built for target_hidden_size, or for the draft's own hidden size where that is not given. "
    "Where they differ, SGLang also leaves the draft its own token embedding instead of the target's.",
    mend="Set target_hidden_size to the target's hidden_size.",
    sources=(_DRAFT, "sglang/srt/models/llama.py LlamaForCausalLM.set_embed (0.5.23)"),
)
def target_hidden_size(setup: Setup) -> Iterator[Said]:
    """target_hidden_size, or the draft's own width, against the target's."""
    actual, built = setup.target.hidden_size, width_in(setup)
    if actual is None or built is None or built == actual or not setup.is_eagle3:
        return
    given = setup.draft.integer("target_hidden_size")
    if given is None:
        yield Said(
            f"the draft is {built} wide, the target {actual}, and the draft has no target_hidden_size",
            change=f"target_hidden_size: not set  ->  {actual}",
        )
    else:
        yield Said(
            f"target_hidden_size is {given}, and the target is {actual} wide",
            change=f"target_hidden_size: {given}  ->  {actual}",
        )


@rule(
    "CK303",
    "FC_SKIPPED",
    Severity.ERROR,
    summary="what is handed over is as wide as the draft's embedding, so fc is skipped",
    why="The draft tells a target's vector from its own by its width alone. Where both are equal, as with "
    "one chunk, fc and the norms before it never run, without a word.",
    mend="Capture at least two depths, or give the draft another hidden size.",
    sources=(_DRAFT, "https://github.com/sgl-project/sglang/pull/21272"),
)
def fc_skipped(setup: Setup) -> Iterator[Said]:
    """K * H of the target equals H of the draft."""
    found, hidden, own = setup.captured, setup.target.hidden_size, setup.draft.hidden_size
    if not found.depths or found.algorithm != "EAGLE3" or hidden is None:
        return
    if len(found.depths) * hidden == own:
        yield Said(
            f"what is handed over, {plural(len(found.depths), 'chunk')} of {hidden}, is as wide as the draft "
            f"({own}): its fc will be skipped"
        )


@rule(
    "CK304",
    "DECLARED_CHUNKS",
    Severity.ERROR,
    summary="the draft's fc is built for another number of chunks than its config asks for",
    why="Until 0.5.11 fc is built for three chunks whatever the ids. Later, num_aux_hidden_states decides "
    "before the number of ids does. The checkpoint's fc.weight then does not load, or the vector does not "
    "fit.",
    mend="Make num_aux_hidden_states the number of ids, or leave it out.",
    sources=(_DRAFT,),
)
def declared_chunks(setup: Setup) -> Iterator[Said]:
    """The number that fc is built for against the number of ids."""
    found = setup.captured
    if found.algorithm != "EAGLE3" or found.final or not found.ids:
        return
    built = chunks(setup)
    if built == len(found.ids):
        return
    if setup.number < MULTI_LAYER:
        yield Said(
            f"SGLang {setup.version} builds fc for 3 chunks, and {EAGLE_KEY} names {len(found.ids)}",
            mend=("Use SGLang 0.5.12 or later.",),
        )
    else:
        yield Said(
            f"num_aux_hidden_states is {built}, and {EAGLE_KEY} names {len(found.ids)}",
            change=f"num_aux_hidden_states: {built}  ->  {len(found.ids)}",
        )
