"""SGLang's aux layer ids as depths, and back: the rules of its model classes, as data.

SGLang captures the *input* of decoder layer k, which is the residual stream at depth k. Which k an id
in `eagle_aux_hidden_state_layer_ids` asks for depends on the model class and the version. Whatever the
order of the ids, the chunks come out in ascending depth, and an id given twice yields one chunk.
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum


class Rule(Enum):
    """How a model class turns explicit ids into the layers whose input it captures."""

    OUTPUT = "an id names the output of that layer (id + 1 is captured)"
    FIRST_ID = (
        "a first id of 1 means layer outputs (id + 1), any other first id means layer inputs (id as it is)"
    )
    LAST_BOUNDARY = "ids that contain the number of layers are taken as they are, others as outputs (id + 1)"


@dataclass(frozen=True)
class ClassRule:
    """One rule of a model class, valid from a version on.

    Attributes:
        since: first SGLang version with this rule, as a tuple; () for "always".
        captures_last: whether the output of the last layer (depth L) can be captured.
        default_plus_one: whether the ids used when none are given go through the rule too.
    """

    rule: Rule
    since: tuple[int, ...] = ()
    captures_last: bool = False
    default_plus_one: bool = False


_OUTPUT = ClassRule(Rule.OUTPUT)
_OUTPUT_AND_LAST = ClassRule(Rule.OUTPUT, captures_last=True)
# The first-id rule came to the DeepSeek family with 0.5.13.post1; before, it added one like everybody else.
_DEEPSEEK = (_OUTPUT, ClassRule(Rule.FIRST_ID, since=(0, 5, 13, 1)))
# In gpt-oss the last boundary became reachable in 0.5.18 (0.5.15.post1 still lacks it).
_GPT_OSS = (_OUTPUT, ClassRule(Rule.LAST_BOUNDARY, since=(0, 5, 18), captures_last=True))

# Classes absent here follow `_OUTPUT`: Llama, Qwen2/3 and their MoE kin, GLM-4-MoE, MiniMax-M2, Bailing, ...
_RULES: dict[str, tuple[ClassRule, ...]] = {
    "DeepseekV2ForCausalLM": _DEEPSEEK,
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "DeepseekV32ForCausalLM": _DEEPSEEK,
    "GlmMoeDsaForCausalLM": _DEEPSEEK,
    "Glm4MoeLiteForCausalLM": _DEEPSEEK,
    "KimiK25ForConditionalGeneration": _DEEPSEEK,
    "MistralLarge3ForCausalLM": _DEEPSEEK,
    "GptOssForCausalLM": _GPT_OSS,
    "Gemma3ForCausalLM": (_OUTPUT_AND_LAST,),
    "Gemma3ForConditionalGeneration": (_OUTPUT_AND_LAST,),
    "EmbeddingGemmaModel": (_OUTPUT_AND_LAST,),
    "Gemma4ForCausalLM": (_OUTPUT_AND_LAST,),
    "Gemma4ForConditionalGeneration": (_OUTPUT_AND_LAST,),
    "MiniMaxM3SparseForCausalLM": (_OUTPUT_AND_LAST,),
    "MiniMaxM3SparseForConditionalGeneration": (
        ClassRule(Rule.OUTPUT, captures_last=True, default_plus_one=True),
    ),
}


@dataclass(frozen=True)
class Reach:
    """Ids that make a model hand over the wanted depths, or why there are none."""

    ids: list[int] | None
    reason: str


def class_rule(architecture: str, version: str | None) -> ClassRule:
    """The rule in force for a model class; an unknown version is taken as the newest known."""
    rules = _RULES.get(architecture, (_OUTPUT,))
    number = parse_version(version)
    if number is None:
        return rules[-1]
    return [r for r in rules if r.since <= number][-1]


def parse_version(version: str | None) -> tuple[int, ...] | None:
    """`0.5.13.post1` -> (0, 5, 13, 1); None when there is no number to read."""
    match = re.match(r"v?(\d+(?:\.\d+)*)(?:\.?post(\d+))?", version or "")
    if match is None:
        return None
    release = tuple(int(part) for part in match[1].split("."))
    # Pad, so that the number of a post release never lands in the place of a patch number.
    release += (0,) * (3 - len(release))
    return (*release, int(match[2])) if match[2] else release


def requested_depths(
    architecture: str, ids: Sequence[int] | None, num_layers: int, version: str | None = None
) -> list[int]:
    """The depths asked for, one an id and in the order of the ids, whether or not they can be captured.

    Args:
        ids: as written in the draft's config; None for the model's default.
    """
    entry = class_rule(architecture, version)
    if ids is None:
        defaults = [2, num_layers // 2, num_layers - 3]
        return [d + 1 for d in defaults] if entry.default_plus_one else defaults
    if entry.rule is Rule.FIRST_ID and (not ids or ids[0] != 1):
        return list(ids)
    if entry.rule is Rule.LAST_BOUNDARY and ids and max(ids) == num_layers:
        return list(ids)
    return [i + 1 for i in ids]


def depths_of(
    architecture: str, ids: Sequence[int] | None, num_layers: int, version: str | None = None
) -> list[int]:
    """The depths that the chunks carry: ascending, once each, without those the model never reaches."""
    top = num_layers if class_rule(architecture, version).captures_last else num_layers - 1
    return sorted({d for d in requested_depths(architecture, ids, num_layers, version) if 0 <= d <= top})


def ids_for(architecture: str, depths: Sequence[int], num_layers: int, version: str | None = None) -> Reach:
    """Ids that make the model capture `depths`, found by trying; `ids` is None when nothing reaches them."""
    wanted = sorted(set(depths))
    entry = class_rule(architecture, version)
    if not wanted:
        return Reach(None, "no depths are wanted")
    if wanted[0] < 0 or wanted[-1] > num_layers:
        return Reach(None, f"the model has {num_layers} layers, so depths end at {num_layers}")
    for ids in _candidates(wanted):
        if depths_of(architecture, ids, num_layers, version) == wanted:
            return Reach(ids, entry.rule.value)
    if wanted[-1] == num_layers and not entry.captures_last:
        name = architecture or "this model"
        return Reach(
            None, f"SGLang never captures the output of the last layer (depth {num_layers}) in {name}"
        )
    return Reach(None, f"the rule of {architecture} cannot express these depths ({entry.rule.value})")


def _candidates(wanted: Sequence[int]) -> Iterator[list[int]]:
    """Ids worth trying: as outputs, as inputs, then either with another id in front (first-id rule)."""
    outputs = [d - 1 for d in wanted]
    inputs = list(wanted)
    yield outputs
    yield inputs
    for ids, lead in itertools.product((outputs, inputs), range(1, len(wanted))):
        yield [ids[lead], *ids[:lead], *ids[lead + 1 :]]
