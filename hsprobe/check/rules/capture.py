"""CK11x: whether the target's class can hand states to this draft, and whether they are whole."""

from __future__ import annotations

from collections.abc import Iterator

from hsprobe.check.captured import EAGLE_KEY
from hsprobe.check.model import Said, Severity, rule
from hsprobe.check.setup import Setup
from hsprobe.diagnose.naming import listed, plural
from hsprobe.formats.sglang_ids import DFLASH
from hsprobe.formats.sglang_models import Beyond, by_class

_SETTERS = {"EAGLE3": "set_eagle3_layers_to_capture", DFLASH: "set_dflash_layers_to_capture"}
_GRAPHS_FIXED = (0, 5, 11)


@rule(
    "CK110",
    "NO_CAPTURE",
    Severity.ERROR,
    summary="the target's class hands no aux states to a draft in this version",
    why="SGLang calls the class's method that sets the layers to capture; without one (or with one that "
    "no layer listens to) the server stops, or the draft gets no chunks.",
    mend="Use a version of SGLang whose class has it, or another algorithm.",
    sources=(
        "sglang/srt/model_executor/model_runner_components/attention_backend_setup.py (0.5.23)",
        "https://github.com/sgl-project/sglang/pull/38307",
    ),
)
def no_capture(setup: Setup) -> Iterator[Said]:
    """A known class without the method in this version, or whose method has no effect."""
    found, name = setup.captured, setup.target.architecture
    row = by_class().get(name)
    if row is None or found.final or not setup.has_algorithm:
        return
    history = row.dflash if found.family == DFLASH else row.eagle3
    working = [r for r in history if r.captures and r.since > setup.number]
    later = f"Use SGLang {'.'.join(map(str, working[0].since[:3]))} or later." if working else ""
    mend = (later,) if later else ()
    if found.rule is None:
        yield Said(
            f"{name} has no working {_SETTERS[found.family]} in SGLang {setup.version}, so "
            f"{found.algorithm} gets no chunks from it",
            mend=mend,
        )
    elif not found.rule.captures:
        yield Said(
            f"{name} in SGLang {setup.version} stores the ids where no layer reads them: no chunk comes",
            mend=mend,
        )


@rule(
    "CK111",
    "UNKNOWN_CLASS",
    Severity.NOTE,
    summary="the rule of the target's class is not known",
    why="The depths are worked out by the rule of most classes (an id names the output of that layer). A "
    "class that SGLang cannot draft for stops the server at start.",
    mend="Capture from the running server and let hsprobe diff name the depths.",
    sources=("sglang/srt/models/ (0.5.9, 0.5.15.post1, 0.5.23)",),
)
def unknown_class(setup: Setup) -> Iterator[Said]:
    """A class that is not in the table."""
    name = setup.target.architecture
    if setup.captured.final or name in by_class():
        return
    if not name:
        yield Said(f"{setup.target.path} names no architecture")
    else:
        yield Said(f"the id rule of {name} is not among those of the {len(by_class())} classes known here")


@rule(
    "CK112",
    "GRAPH_DEFAULTS",
    Severity.ERROR,
    summary="this version records CUDA graphs with the default layers, not with the configured ones",
    why="Until 0.5.10 the graph runner called the setter without ids and the configured ids came after "
    "it: prefill hands over the configured depths, decode and verify the default ones.",
    mend="Use SGLang 0.5.11 or later, or serve with --disable-cuda-graph.",
    sources=("https://github.com/sgl-project/sglang/pull/22836",),
)
def graph_defaults(setup: Setup) -> Iterator[Said]:
    """Configured depths that are not the default ones, in a version with the fault."""
    found, layers = setup.captured, setup.target.num_layers
    if found.family == DFLASH or not found.depths or layers is None or setup.number >= _GRAPHS_FIXED:
        return
    default = sorted({2, layers // 2, layers - 3})
    if found.depths != default:
        text = (
            f"SGLang {setup.version} records its CUDA graphs with depths {listed(default)}, so decode and "
            "verify do not hand over the configured ones"
        )
        if found.rule is not None and found.rule.beyond is Beyond.INDEX_ERROR:
            # These classes mark layers, and no mark is taken away again.
            both = sorted({*default, *found.depths})
            text += f"; prefill then hands over both, {plural(len(both), 'chunk')}: {listed(both)}"
        yield Said(text)


@rule(
    "CK113",
    "AUX_TURNED_OFF",
    Severity.WARNING,
    summary="use_aux_hidden_state is off: the draft is handed the final state instead of chunks",
    why="With eagle_config.use_aux_hidden_state false, EAGLE3 hands over the state after the final norm. "
    "It is as wide as the embedding, so the draft skips its fc. Some drafts are made so; one with ids or "
    "a wide fc is not.",
    mend=f"Set eagle_config.use_aux_hidden_state to true, or leave it out, if the draft has {EAGLE_KEY}.",
    sources=(
        "https://github.com/sgl-project/sglang/pull/14920",
        "sglang/srt/models/llama_eagle3.py LlamaModel.forward (0.5.23)",
    ),
)
def aux_turned_off(setup: Setup) -> Iterator[Said]:
    """EAGLE3 without aux states, for a draft that looks made for them."""
    found, hidden = setup.captured, setup.target.hidden_size
    if not (found.algorithm == "EAGLE3" and found.final):
        return
    fc = setup.draft_weights.tensors.get("fc.weight")
    wide = fc is not None and hidden is not None and len(fc.shape) == 2 and fc.shape[1] > 2 * hidden
    if found.ids or wide:
        why = (
            f"{EAGLE_KEY} is {found.ids}" if found.ids else f"its fc takes {fc.shape[1] if fc else 0} values"
        )
        yield Said(
            f"use_aux_hidden_state is off, and {why}: the draft gets the final state and skips fc",
            severity=Severity.ERROR,
        )
    else:
        yield Said("eagle_config.use_aux_hidden_state is off: the draft gets the state after the final norm")


@rule(
    "CK114",
    "PARTIAL_SUMS",
    Severity.NOTE,
    summary="with tensor parallelism this class may hand over one rank's partial sums",
    why="Where the all-reduce is fused into the next layer's norm (Hopper and Blackwell, up to 2048 "
    "rows), these versions take the chunk before it. It then looks like quantisation noise, and differs "
    "from rank to rank.",
    mend="Use SGLang 0.5.21 or later (0.5.15 for the DeepSeek family), or serve with "
    "--enforce-disable-flashinfer-allreduce-fusion, which 0.5.9 does not have.",
    sources=("https://github.com/sgl-project/sglang/pull/28343",),
)
def partial_sums(setup: Setup) -> Iterator[Said]:
    """A class whose capture reads before a deferred all-reduce in this version."""
    found = setup.captured
    if found.rule is not None and found.rule.partial and not found.final:
        yield Said(
            f"{setup.target.architecture} in SGLang {setup.version} takes its chunks before a fused "
            "all-reduce, if it is served on several GPUs"
        )
