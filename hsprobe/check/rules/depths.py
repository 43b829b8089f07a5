"""CK10x: which depths the ids ask for, and which come."""

from __future__ import annotations

from collections.abc import Iterator

from hsprobe.check.captured import DFLASH_KEY, EAGLE_KEY, KEY, Captured
from hsprobe.check.config import as_ids, shown
from hsprobe.check.model import Said, Severity, rule
from hsprobe.check.setup import Setup
from hsprobe.check.wording import depth_list, depth_words
from hsprobe.diagnose.naming import listed
from hsprobe.formats.sglang_ids import (
    DFLASH,
    Rule,
    depths_of,
    ids_for,
    requested_depths,
    rule_of,
    stops_at_embedding,
)

_LLAMA = "sglang/srt/models/llama.py set_eagle3_layers_to_capture (0.5.23)"
_TWO_CONVENTIONS = "https://github.com/sgl-project/sglang/pull/25454"
# Other names under which exporters write the ids.
_ELSEWHERE = (
    KEY,
    "aux_hidden_state_layer_ids",
    "eagle_aux_layer_ids",
    "aux_layer_ids",
    "target_layer_ids",
    "layer_ids",
)


def ids_key(captured: Captured) -> str:
    """The key under which SGLang reads the ids of this algorithm."""
    return DFLASH_KEY if captured.family == DFLASH else EAGLE_KEY


@rule(
    "CK101",
    "EMBEDDING_ID",
    Severity.ERROR,
    summary="an id asks for the embedding output (depth 0)",
    why="The chunk holds token embeddings instead of a layer's output. Nothing crashes: every shape is "
    "right, and the draft is handed a state that it was hardly trained on. Some model classes of older "
    "versions do stop, with a TypeError in the first forward.",
    mend="Name the layers whose outputs the draft was trained on; the lowest output is that of layer 0.",
    sources=(_LLAMA, "https://github.com/NickL77/BaldEagle/issues/18"),
)
def embedding_id(setup: Setup) -> Iterator[Said]:
    """Depth 0 among the captured depths."""
    found = setup.captured
    if found.ids is None or not found.depths or 0 not in found.depths or found.requested is None:
        return
    chunk = found.depths.index(0)
    number = found.ids[found.requested.index(0)]
    stops = stops_at_embedding(setup.target.architecture, setup.version)
    yield Said(
        f"id {number} asks for the embedding output (depth 0), at which SGLang {setup.version} stops: its "
        "first forward raises TypeError"
        if stops
        else f"id {number} puts the embedding output (depth 0) into chunk {chunk}",
        mend=(
            f"Name the layers whose outputs the draft was trained on in {found.key}; SGLang {setup.version} "
            f"reads them by this rule: {found.rule.rule.value if found.rule else Rule.OUTPUT.value}.",
        ),
        # A negative id is a layer number that somebody took one off; 0 may have been meant.
        severity=Severity.ERROR if number < 0 or stops else Severity.WARNING,
    )


@rule(
    "CK102",
    "IGNORED_IDS",
    Severity.ERROR,
    summary="layer ids stand under a key that SGLang does not read",
    why="SGLang reads the ids of an EAGLE-3 draft in eagle_config alone and takes the model's default "
    "where they are missing there, without a word; a top-level list only sets a width.",
    mend="Put the ids where SGLang reads them, in the convention that the target's class follows.",
    sources=(
        "sglang/srt/model_executor/model_runner_components/spec_aux_hidden_state.py (0.5.23)",
        "https://github.com/lightseekorg/tokenspeed/pull/526",
    ),
)
def ignored_ids(setup: Setup) -> Iterator[Said]:
    """Ids at the top level, or under the key of another algorithm."""
    found = setup.captured
    if found.ids is not None and found.given is not None:
        return
    if found.final or found.given is not None:
        return
    eagle, dflash = setup.draft.part("eagle_config"), setup.draft.part("dflash_config")
    places = [(key, setup.draft.raw.get(key)) for key in _ELSEWHERE]
    places += [(f"eagle_config.{key}", value) for key, value in eagle.items() if key in _ELSEWHERE[1:]]
    if found.family == DFLASH:
        places.append((EAGLE_KEY, eagle.get(KEY)))
    else:
        places.append((DFLASH_KEY, dflash.get("target_layer_ids")))
    for key, value in places:
        ids = as_ids(value)
        if ids:
            yield _ignored(setup, key, ids)
            return


def _ignored(setup: Setup, key: str, ids: list[int]) -> Said:
    found = setup.captured
    outputs, layers = [i + 1 for i in ids], setup.target.num_layers
    same = found.depths is not None and found.depths in (sorted(ids), sorted(outputs))
    text = f"SGLang does not read {key} {shown(ids)}"
    if found.depths is not None:
        text += f": it will capture its default, depths {listed(found.depths)}"
    mend = []
    if layers is not None:
        for meaning, depths in (("layer outputs", outputs), ("depths, as vLLM counts", ids)):
            reach = ids_for(setup.target.architecture, depths, layers, setup.version, found.family)
            if reach.ids is not None:
                mend.append(f"If these ids name {meaning}, set {ids_key(found)} to {reach.ids}.")
    return Said(text, mend=tuple(mend), severity=Severity.WARNING if same else None)


@rule(
    "CK103",
    "DEFAULT_IDS",
    Severity.NOTE,
    summary="the draft's config names no layer ids",
    why="SGLang then captures depths 2, L//2 and L-3, which is what most trainers of EAGLE-3 drafts take "
    "by default. A DFlash draft gets ids guessed from the numbers of layers, which few drafts were "
    "trained on.",
    mend="Write down the layers that the draft was trained on, so that no default decides.",
    sources=(_LLAMA, "https://github.com/sgl-project/sglang/issues/37475"),
)
def default_ids(setup: Setup) -> Iterator[Said]:
    """No usable ids anywhere; DFlash's guess is likely wrong."""
    found = setup.captured
    if found.final or found.given is not None or any(ignored_ids(setup)):
        return
    what = f"depths {depth_list(found.depths)}" if found.depths else "its default"
    guessed = found.family == DFLASH
    yield Said(
        f"no layer ids in {ids_key(found)}: SGLang will capture {what}",
        severity=Severity.WARNING if guessed else None,
    )


@rule(
    "CK104",
    "BAD_IDS",
    Severity.ERROR,
    summary="the layer ids are not a list of integers",
    why="SGLang adds one to every id or hands them on as they are: the server stops at start, or captures "
    "nothing.",
    mend="Write the ids as a list of integers.",
    sources=(_LLAMA,),
)
def bad_ids(setup: Setup) -> Iterator[Said]:
    """Something else than integers, or an empty list."""
    found = setup.captured
    if found.final or found.given is None:
        return
    if found.ids is None:
        yield Said(f"{found.key} is {shown(found.given)}, which is not a list of integers")
    elif not found.ids:
        yield Said(f"{found.key} is an empty list: no chunk will be captured")


@rule(
    "CK105",
    "OTHER_CONVENTION",
    Severity.WARNING,
    summary="the ids look like depths, and SGLang reads them as layer outputs",
    why="Drafts are published with ids of two conventions: the layer whose output is taken, and the layer "
    "whose input is taken (transformers' and vLLM's counting). Read by the wrong one, all chunks come one "
    "layer late, which costs acceptance and raises no error.",
    mend="If the ids count depths, take one off each.",
    sources=(_TWO_CONVENTIONS, "https://github.com/vllm-project/vllm/pull/43671"),
)
def other_convention(setup: Setup) -> Iterator[Said]:
    """The ids are exactly the usual default depths, or end in the number of layers, and one is added."""
    found, layers = setup.captured, setup.target.num_layers
    if not found.ids or layers is None or found.requested is None or found.family == DFLASH:
        return
    if setup.train is not None and setup.train.depths is not None and setup.train.sure:
        # What the draft was trained on is known: CK801 tells.
        return
    adds_one = found.requested == [i + 1 for i in found.ids]
    usual = [2, layers // 2, layers - 3]
    if not adds_one or (sorted(found.ids) != usual and layers not in found.ids):
        return
    reach = ids_for(setup.target.architecture, found.ids, layers, setup.version, found.family)
    which = "the usual depths" if sorted(found.ids) == usual else "depths up to the last layer's output"
    text = (
        f"the ids {found.ids} are {which} of a model of {layers} layers, and SGLang {setup.version} reads "
        f"them as layer outputs: depths {listed(found.requested)}"
    )
    if reach.ids is None:
        yield Said(text, mend=(f"If they count depths, no ids reach them: {reach.reason}.",))
    else:
        yield Said(text, mend=(f"If they count depths, set {found.key} to {reach.ids}.",))


@rule(
    "CK106",
    "UNREACHED_DEPTH",
    Severity.ERROR,
    summary="a depth is asked for that the target's class never captures",
    why="Most classes look at the ids before each layer, so the output of the last layer is never "
    "reached. Its chunk is missing, and the draft's fc is handed a narrower vector, or the server stops.",
    mend="Train the draft on depths that can be captured, or use a version of SGLang whose class reaches "
    "them.",
    sources=(
        "https://github.com/sgl-project/sglang/pull/32334",
        "https://github.com/sgl-project/sglang/issues/32204",
        "https://github.com/vllm-project/vllm/pull/46973",
    ),
)
def unreached_depth(setup: Setup) -> Iterator[Said]:
    """Depths that no chunk will hold."""
    found, layers = setup.captured, setup.target.num_layers
    if not found.lost or found.rule is None or layers is None or not found.rule.captures:
        return
    for depth in found.lost:
        where = f"the output of the last layer (depth {layers})" if depth == layers else f"depth {depth}"
        if depth < 0 or depth > layers:
            where = f"depth {depth}, which a model of {layers} layers does not have"
        yield Said(
            f"the ids ask for {where}: {setup.target.architecture} in SGLang {setup.version} never captures "
            f"it, and {found.rule.beyond.value}",
        )


@rule(
    "CK107",
    "DUPLICATE_IDS",
    Severity.ERROR,
    summary="two ids ask for the same depth",
    why="A depth is captured once, however often it is named: there are fewer chunks than ids, and the "
    "draft's fc is handed a narrower vector.",
    mend="Name every layer once.",
    sources=("sglang/srt/models/llama.py LlamaModel.forward (0.5.23)",),
)
def duplicate_ids(setup: Setup) -> Iterator[Said]:
    """Repeated depths among those asked for."""
    asked = setup.captured.requested or []
    twice = sorted({d for d in asked if asked.count(d) > 1}) if len(asked) < 1000 else []
    if twice:
        yield Said(f"the ids {setup.captured.ids} ask for {depth_words(twice)} more than once; it comes once")


@rule(
    "CK108",
    "ORDER_OF_IDS",
    Severity.WARNING,
    summary="the ids are not in ascending order",
    why="SGLang concatenates in ascending layer order whatever the order of the ids. A trainer that "
    "concatenates in the order of its list has trained fc for another order.",
    mend="If the draft was trained on chunks in the order of the list, put the column blocks of fc.weight "
    "in ascending order of the layers.",
    sources=(
        "https://github.com/ml-explore/mlx-lm/pull/1469",
        "sglang/srt/layers/aux_hidden_states.py (0.5.23)",
    ),
)
def order_of_ids(setup: Setup) -> Iterator[Said]:
    """Ids that are not sorted."""
    found = setup.captured
    if found.ids and found.requested and found.requested != sorted(found.requested) and found.depths:
        yield Said(f"the ids {found.ids} come back in ascending order: depths {listed(found.depths)}")


@rule(
    "CK109",
    "VERSION_DEPENDENT",
    Severity.NOTE,
    summary="other versions of SGLang read the same ids as other depths",
    why="The classes of the DeepSeek family read ids as outputs until 0.5.12 and by their first id since "
    "0.5.13; gpt-oss changed in 0.5.18. A draft that is right in one version is a layer off in another.",
    mend="Pin the version of SGLang, or check again with --sglang when it changes.",
    sources=(_TWO_CONVENTIONS, "https://github.com/sgl-project/sglang/pull/32334"),
)
def version_dependent(setup: Setup) -> Iterator[Said]:
    """The versions that read these ids otherwise."""
    found, layers, name = setup.captured, setup.target.num_layers, setup.target.architecture
    if found.ids is None or layers is None or found.rule is None or found.requested is None:
        return
    others = []
    for version in KNOWN:
        if rule_of(name, version, found.family) is None:
            continue
        if requested_depths(name, found.ids, layers, version, found.family) != found.requested:
            others.append((version, depths_of(name, found.ids, layers, version, found.family)))
    if others:
        told = "; ".join(f"{version}: {listed(depths)}" for version, depths in others)
        yield Said(f"other versions of SGLang read {found.ids} as other depths ({told})")


KNOWN = ("0.5.9", "0.5.15.post1", "0.5.23")
