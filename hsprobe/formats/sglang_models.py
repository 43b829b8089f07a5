"""Which model classes of SGLang hand aux states to a draft, by which rule, from which version on: as data.

Source: `sglang/srt/models/<file>.py`: the methods `set_eagle3_layers_to_capture` and
`set_dflash_layers_to_capture`, and the loops that read `layers_to_capture`, in the wheels of 0.5.9,
0.5.10.post1, 0.5.11, 0.5.12.post1, 0.5.13.post1, 0.5.15.post1, 0.5.18, 0.5.20 to 0.5.23. "Since" is the first
of these. A test runs the methods of the installed SGLang and holds this table against them.
"""

from dataclasses import dataclass, replace
from enum import Enum
from functools import cache

Version = tuple[int, ...]

NEWEST = "0.5.23"
"""The newest version that was read."""
OLDEST = "0.5.9"
ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN", "DFLASH", "DSPARK", "FROZEN_KV_MTP")
"""Speculative algorithms whose draft is handed states of the target."""
ALGORITHM_SINCE: dict[str, Version] = {
    "DFLASH": (0, 5, 11),
    "FROZEN_KV_MTP": (0, 5, 12, 1),
    "DSPARK": (0, 5, 18),
}
"""First version with an algorithm, for those that 0.5.9 lacks: `speculative/spec_info.py`."""


class Rule(Enum):
    """How a model class turns explicit ids into the layers whose input it captures."""

    OUTPUT = "an id names the output of that layer (id + 1 is captured)"
    INPUT = "an id names the input of that layer (id as it is)"
    FIRST_ID = (
        "a first id of 1 means layer outputs (id + 1), any other first id means layer inputs (id as it is)"
    )
    LAST_BOUNDARY = "ids that contain the number of layers are taken as they are, others as outputs (id + 1)"


class Beyond(Enum):
    """What becomes of a depth that the model's loop never reaches."""

    DROPPED = "its chunk is missing, without a word"
    COUNT_ERROR = "the first forward raises RuntimeError (captured x of y aux hidden states)"
    INDEX_ERROR = "the server stops at start with IndexError"
    VALUE_ERROR = "the server stops at start with ValueError"


@dataclass(frozen=True)
class ClassRule:
    """One rule of a model class, valid from a version on.

    Attributes:
        since: first SGLang version with this rule, as a tuple; () for "always".
        captures_last: whether the output of the last layer (depth L) can be captured.
        default_plus_one: whether the ids used when none are given go through the rule too.
        captures: False where the ids are stored and no layer reads them.
        partial: whether chunks may be one rank's partial sums under tensor parallelism, because the state is
            taken before a deferred all-reduce.
    """

    rule: Rule
    since: Version = ()
    captures_last: bool = False
    default_plus_one: bool = False
    beyond: Beyond = Beyond.DROPPED
    captures: bool = True
    partial: bool = False


@dataclass(frozen=True)
class ModelFile:
    """Classes of one file that share a history. Histories ascend by `since`; an empty one: no such method."""

    file: str
    classes: tuple[str, ...]
    eagle3: tuple[ClassRule, ...] = ()
    dflash: tuple[ClassRule, ...] = ()


_ALWAYS = ClassRule(Rule.OUTPUT)
_V10, _V11, _V12, _V13 = (0, 5, 10, 1), (0, 5, 11), (0, 5, 12, 1), (0, 5, 13, 1)
_V15, _V18, _V20, _V21, _V22, _V23 = (0, 5, 15, 1), (0, 5, 18), (0, 5, 20), (0, 5, 21), (0, 5, 22), (0, 5, 23)


def _from(version: Version, rule: ClassRule = _ALWAYS, **changes: object) -> ClassRule:
    return replace(rule, since=version, **changes)  # type: ignore[arg-type]


_LAST = ClassRule(Rule.OUTPUT, captures_last=True)
_FLAGGED = ClassRule(Rule.OUTPUT, beyond=Beyond.INDEX_ERROR)
_PACKED = ClassRule(Rule.OUTPUT, beyond=Beyond.COUNT_ERROR)
_RANGED = ClassRule(Rule.OUTPUT, captures_last=True, beyond=Beyond.VALUE_ERROR)

_PARTIAL = ClassRule(Rule.OUTPUT, partial=True)
_DEEPSEEK = (
    _PARTIAL,
    _from(_V13, ClassRule(Rule.FIRST_ID, partial=True)),
    _from(_V15, ClassRule(Rule.FIRST_ID)),
    _from(_V18, ClassRule(Rule.FIRST_ID, beyond=Beyond.COUNT_ERROR)),
)
_DEEPSEEK_DFLASH = (_from(_V11), _from(_V18, _PACKED))
_GLM_LITE = (
    _PARTIAL,
    _from(_V13, ClassRule(Rule.FIRST_ID, partial=True)),
    _from(_V21, ClassRule(Rule.FIRST_ID)),
)
_MERGED = (_PARTIAL, _from(_V21))
_BOUNDARY = ClassRule(Rule.LAST_BOUNDARY, captures_last=True)
_GPT_OSS = (_PARTIAL, _from(_V18, _BOUNDARY, partial=True), _from(_V21, _BOUNDARY))
# The wrapper stored the ids on the inner model, whose layers look at a flag of their own (fixed in 0.5.22).
_QWEN35_VL = (ClassRule(Rule.OUTPUT, since=_V11, captures=False), _from(_V22, _FLAGGED))

FILES: tuple[ModelFile, ...] = (
    ModelFile(
        "llama",
        (
            "LlamaForCausalLM", "Phi3ForCausalLM", "InternLM3ForCausalLM", "IQuestCoderForCausalLM",
            "Llama4ForCausalLM", "Ministral3ForCausalLM", "MistralForCausalLM", "TeleFLMForCausalLM",
        ),
        (_ALWAYS,),
        (_from(_V11),),
    ),
    ModelFile("mllama4", ("Llama4ForConditionalGeneration",), (_ALWAYS,)),
    ModelFile("qwen2", ("Qwen2ForCausalLM",), (_ALWAYS,)),
    ModelFile("qwen3", ("Qwen3ForCausalLM",), (_ALWAYS,), (_from(_V11),)),
    ModelFile("qwen2_moe", ("Qwen2MoeForCausalLM",), (_FLAGGED,)),
    ModelFile("qwen3_moe", ("Qwen3MoeForCausalLM",), (_FLAGGED,), (_from(_V11, _FLAGGED),)),
    ModelFile("qwen3_moe", ("MellumForCausalLM",), (_from(_V18, _FLAGGED),), (_from(_V18, _FLAGGED),)),
    ModelFile("qwen3_next", ("Qwen3NextForCausalLM",), (_FLAGGED,), (_from(_V11, _FLAGGED),)),
    ModelFile(
        "qwen3_5_text",
        ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
        (_from(_V22, _FLAGGED),),
        # A second definition of the method shadowed the one that adds one (until 0.5.21).
        (
            ClassRule(Rule.INPUT, since=_V18, beyond=Beyond.INDEX_ERROR),
            _from(_V22, ClassRule(Rule.OUTPUT, beyond=Beyond.VALUE_ERROR)),
        ),
    ),
    ModelFile("qwen2_5_vl", ("Qwen2_5_VLForConditionalGeneration",), (_ALWAYS,)),
    ModelFile(
        "qwen3_vl",
        ("Qwen3VLForConditionalGeneration", "InternS1ProForConditionalGeneration"),
        (_from(_V11),),
        # Its DFlash method calls one that the inner model (Qwen3LLMModel) does not have.
    ),
    ModelFile(
        "qwen3_vl",
        ("Qwen3VLMoeForConditionalGeneration",),
        (_from(_V11), _from(_V22, _FLAGGED)),
        (_from(_V11, _FLAGGED),),
    ),
    ModelFile(
        "qwen3_5",
        ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
        _QWEN35_VL,
        (_from(_V11, _FLAGGED),),
    ),
    ModelFile(
        "deepseek_v2",
        (
            "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM",
            "GlmMoeDsaForCausalLM", "MistralLarge3ForCausalLM",
        ),
        _DEEPSEEK,
        _DEEPSEEK_DFLASH,
    ),
    ModelFile(
        "kimi_k25",
        ("KimiK25ForConditionalGeneration",),
        (_from(_V10, _PARTIAL), *_DEEPSEEK[1:]),
        _DEEPSEEK_DFLASH,
    ),
    ModelFile("glm4_moe_lite", ("Glm4MoeLiteForCausalLM",), _GLM_LITE, (_from(_V11),)),
    ModelFile("glm4_moe", ("Glm4MoeForCausalLM",), _MERGED),
    ModelFile("glm5_next", ("Glm5NextForConditionalGeneration",), (_from(_V20),), (_from(_V20),)),
    ModelFile("gpt_oss", ("GptOssForCausalLM",), _GPT_OSS, (_from(_V11), _from(_V18, _LAST))),
    ModelFile(
        "bailing_moe", ("BailingMoEForCausalLM", "BailingMoeForCausalLM", "BailingMoeV2ForCausalLM"), _MERGED
    ),
    ModelFile("bailing_moe", ("SarvamMoEForCausalLM",), (_from(_V10, _PARTIAL), _from(_V21))),
    ModelFile("exaone_moe", ("ExaoneMoEForCausalLM",), (_ALWAYS,)),
    ModelFile("exaone_moe", ("ExaoneMoeForCausalLM",), (_from(_V22),)),
    ModelFile("apertus", ("ApertusForCausalLM",), (_ALWAYS,)),
    ModelFile("minimax_m2", ("MiniMaxM2ForCausalLM",), (_ALWAYS,)),
    ModelFile("minimax_m3", ("MiniMaxM3SparseForCausalLM",), (_from(_V18), _from(_V23, _LAST))),
    ModelFile(
        "minimax_m3_vl",
        ("MiniMaxM3SparseForConditionalGeneration",),
        (_from(_V18, default_plus_one=True), _from(_V23, _LAST, default_plus_one=True)),
        (_from(_V23, _RANGED),),
    ),
    ModelFile("gemma3_causal", ("Gemma3ForCausalLM",), (_from(_V12, _LAST),)),
    ModelFile("gemma3_causal", ("EmbeddingGemmaModel",), (_from(_V18, _LAST),)),
    ModelFile("gemma3_mm", ("Gemma3ForConditionalGeneration",), (_from(_V12, _LAST),)),
    ModelFile("gemma4_causal", ("Gemma4ForCausalLM",), (_from(_V12, _LAST),), (_from(_V15, _LAST),)),
    ModelFile("gemma4_mm", ("Gemma4ForConditionalGeneration",), (_from(_V12, _LAST),), (_from(_V15, _LAST),)),
    ModelFile(
        "gemma4_mm", ("Gemma4UnifiedForConditionalGeneration",), (_from(_V13, _LAST),), (_from(_V15, _LAST),)
    ),
    ModelFile("longcat_flash", ("LongcatFlashForCausalLM",), (_ALWAYS,)),
    ModelFile("laguna", ("LagunaForCausalLM",), (), (_from(_V15, _LAST),)),
    ModelFile("lfm2", ("Lfm2ForCausalLM",), (), (_from(_V20, _LAST),)),
    ModelFile("lfm2_moe", ("Lfm2MoeForCausalLM",), (), (_from(_V20, _LAST),)),
    ModelFile("lfm2_vl", ("Lfm2VlForConditionalGeneration",), (), (_from(_V21, _LAST),)),
    ModelFile(
        "mimo_v2",
        ("MiMoV2ForCausalLM", "MiMoV2FlashForCausalLM"),
        (),
        (_from(_V20, _PACKED, captures_last=True),),
    ),
    ModelFile(
        "nemotron_h", ("NemotronHForCausalLM", "NemotronHPuzzleForCausalLM"), (), (_from(_V20, _LAST),)
    ),
    ModelFile("nanbeige", ("NanbeigeForCausalLM",), (), (_from(_V20),)),
    # The layer's input is captured; drafts whose ids name outputs are mapped before the method is called.
    ModelFile(
        "muse_glimmer",
        ("MuseGlimmerForCausalLM", "MuseGlimmerForConditionalGeneration"),
        (),
        (ClassRule(Rule.INPUT, since=_V18, beyond=Beyond.VALUE_ERROR),),
    ),
    ModelFile("muse_spark", ("MuseSparkForConditionalGeneration",), (), (_from(_V23, _RANGED),)),
    ModelFile("beam", ("BeamForCausalLM",), (), (_from(_V23, _RANGED),)),
)  # fmt: skip

EMBEDS_SINCE: dict[str, Version] = {
    "apertus": _V22,
    "deepseek_v2": _V15,
    "exaone_moe": _V22,
    "glm4_moe": _V21,
    "glm4_moe_lite": _V21,
    "gpt_oss": _V18,
    "kimi_k25": _V15,
    "llama": _V22,
    "longcat_flash": _V21,
    "minimax_m2": _V13,
    "mllama4": _V21,
}
"""File -> first version in which depth 0 can be captured, for those that could not always: before the first
layer there is no residual yet, and adding it to the embedding output raises a TypeError in the forward."""


@cache
def by_class() -> dict[str, ModelFile]:
    """Class name -> its row."""
    return {name: row for row in FILES for name in row.classes}
