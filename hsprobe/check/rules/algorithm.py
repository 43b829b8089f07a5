"""CK2xx: the algorithm, and whether SGLang can load the draft's class."""

from __future__ import annotations

from collections.abc import Iterator

from hsprobe.check.layout import canonical
from hsprobe.check.model import Said, Severity, rule
from hsprobe.check.setup import Setup, draft_kind
from hsprobe.formats.sglang_models import ALGORITHM_SINCE, Version

_LLAMA = "LlamaForCausalLMEagle3"
_MLA = "Eagle3DeepseekV2ForCausalLM"
# First version (of those read) with each draft class: `EntryClass` in `sglang/srt/models/*`.
EAGLE3_CLASSES: dict[str, Version] = {_LLAMA: (), _MLA: (0, 5, 12, 1)}
_SPEC_INFO = "sglang/srt/speculative/spec_info.py SpeculativeAlgorithm (0.5.9, 0.5.15.post1, 0.5.23)"


@rule(
    "CK201",
    "EAGLE_FOR_EAGLE3",
    Severity.ERROR,
    summary="an EAGLE-3 draft is served with --speculative-algorithm EAGLE",
    why="EAGLE hands over the state after the final norm, one H wide. The draft runs its fc only where "
    "the width differs from the embedding's, so it skips it without a word; the acceptance length is "
    "1.00.",
    mend="Serve with --speculative-algorithm EAGLE3.",
    sources=("https://github.com/sgl-project/sglang/pull/21272",),
)
def eagle_for_eagle3(setup: Setup) -> Iterator[Said]:
    """The draft is of the EAGLE-3 kind, the algorithm is not."""
    if setup.is_eagle3 and setup.algorithm in ("EAGLE", "NEXTN"):
        yield Said(
            f"the draft is an EAGLE-3 draft ({setup.draft.architecture or 'by its tensors'}), and "
            f"{setup.algorithm} hands it the final state instead of chunks",
            change=f"--speculative-algorithm {setup.algorithm}  ->  --speculative-algorithm EAGLE3",
        )


@rule(
    "CK202",
    "OTHER_ALGORITHM",
    Severity.ERROR,
    summary="the algorithm is not the one that the draft was made for",
    why="EAGLE3 hands over several layers' states at once; drafts of other kinds take the final state, or "
    "other layers by another rule.",
    mend="Serve the draft with the algorithm that it was made for.",
    sources=(_SPEC_INFO,),
)
def other_algorithm(setup: Setup) -> Iterator[Said]:
    """Any other mismatch between the draft's class and the algorithm."""
    kind = draft_kind(setup.draft, setup.draft_weights)
    same = {kind, setup.algorithm} <= {"EAGLE", "NEXTN", "FROZEN_KV_MTP"}
    if kind != setup.algorithm and not same and not any(eagle_for_eagle3(setup)):
        yield Said(
            f"the draft's class {setup.draft.architecture or '(none)'} is made for {kind}, not for "
            f"{setup.algorithm}",
            change=f"--speculative-algorithm {setup.algorithm}  ->  --speculative-algorithm {kind}",
        )


@rule(
    "CK203",
    "NO_SUCH_DRAFT_CLASS",
    Severity.ERROR,
    summary="SGLang has no draft model of this architecture in this version",
    why="The draft's `architectures` chooses the class that loads it. One that SGLang does not have stops "
    "the server; the name of a target's class loads a whole model of that kind instead of the draft.",
    mend=f'Write "architectures": ["{_LLAMA}"] for a draft with one Llama layer over cat(embedding, hidden).',
    sources=(
        "sglang/srt/models/llama_eagle3.py, kimi_k25_eagle3.py (0.5.23)",
        "sglang/srt/models/registry.py",
    ),
)
def no_such_draft_class(setup: Setup) -> Iterator[Said]:
    """An EAGLE-3 draft whose class SGLang lacks."""
    if setup.algorithm not in ("EAGLE3", "EAGLE") or not setup.is_eagle3:
        return
    name = setup.draft.architecture
    since = EAGLE3_CLASSES.get(name)
    if since is None:
        old = f'"architectures": ["{name}"]' if name else "no architectures"
        yield Said(
            f"SGLang {setup.version} has no EAGLE-3 draft class {name or '(none is named)'}",
            change=f'{old}  ->  "architectures": ["{_LLAMA}"]',
        )
    elif setup.number < since:
        yield Said(
            f"SGLang {setup.version} has no {name}",
            mend=(f"Use SGLang {'.'.join(map(str, since[:3]))} or later.",),
        )


@rule(
    "CK204",
    "NO_SUCH_ALGORITHM",
    Severity.ERROR,
    summary="this version of SGLang does not have the algorithm",
    why="The server refuses the argument.",
    mend="Use a version that has it.",
    sources=(_SPEC_INFO,),
)
def no_such_algorithm(setup: Setup) -> Iterator[Said]:
    """DFlash and later ones in old versions."""
    since = ALGORITHM_SINCE.get(setup.algorithm)
    if since is not None and not setup.has_algorithm:
        yield Said(
            f"SGLang {setup.version} has no {setup.algorithm}",
            mend=(f"Use SGLang {'.'.join(map(str, since[:3]))} or later.",),
        )


@rule(
    "CK205",
    "DRAFT_LAYERS",
    Severity.ERROR,
    summary="the draft's number of layers is not one that its class can run",
    why="Until 0.5.11 an EAGLE-3 draft had one layer, and the server stops on another number; the MLA "
    "class still demands one. Layers in the file beyond num_hidden_layers are left out without a word.",
    mend="Set num_hidden_layers to the number of layers in the file, and use a version that can run them.",
    sources=(
        "sglang/srt/models/llama_eagle3.py (0.5.9, 0.5.12.post1)",
        "sglang/srt/models/kimi_k25_eagle3.py (0.5.23)",
    ),
)
def draft_layers(setup: Setup) -> Iterator[Said]:
    """num_hidden_layers against the class, and against the tensors."""
    layers = setup.draft.num_layers
    if not setup.is_eagle3 or layers is None:
        return
    single = setup.number < (0, 5, 12, 1) or setup.draft.architecture == _MLA
    if layers != 1 and single:
        yield Said(
            f"the draft's num_hidden_layers is {layers}, and {setup.draft.architecture or 'its class'} in "
            f"SGLang {setup.version} runs 1",
            change=f"num_hidden_layers: {layers}  ->  1",
        )
    stored = {
        part[1]
        for name in setup.draft_weights.named
        if (part := canonical(setup, name).split("."))[0] == "layers" and len(part) > 1 and part[1].isdigit()
    }
    if stored and len(stored) != layers:
        yield Said(
            f"the draft's file holds {len(stored)} layers and num_hidden_layers is {layers}",
            change=f"num_hidden_layers: {layers}  ->  {len(stored)}",
        )


@rule(
    "CK206",
    "NO_DRAFT",
    Severity.WARNING,
    summary="the draft's folder looks like a whole model, not like a draft",
    why="It has no layer that takes the target's states: neither fc, nor MTP layers. As a draft of its own "
    "(STANDALONE) it is handed nothing, and there is nothing to check.",
    mend="Give the folder of the draft.",
    sources=(_SPEC_INFO,),
)
def no_draft(setup: Setup) -> Iterator[Said]:
    """A draft that nothing marks as one."""
    if setup.algorithm != "NEXTN" or setup.is_eagle3 or setup.draft.get("num_nextn_predict_layers"):
        return
    name = setup.draft.architecture
    marked = name.endswith(("NextN", "MTP")) or any(
        part in tensor for tensor in setup.draft_weights.named for part in ("fc.", "eh_proj", "mtp", "nextn")
    )
    if not marked:
        yield Said(f"nothing marks {name or 'the draft'} as a draft: it has no fc and no MTP layers")
