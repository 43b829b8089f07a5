"""The id rules, checked against what SGLang's model classes were read to do."""

import itertools

import pytest

from hsprobe.formats.sglang_ids import depths_of, ids_for, parse_version, requested_depths


@pytest.mark.parametrize(
    ("architecture", "version", "ids", "depths"),
    [
        ("LlamaForCausalLM", "0.5.23", [-1, 2, 5], [0, 3, 6]),
        ("LlamaForCausalLM", "0.5.23", [2, 5, 8], [3, 6, 9]),
        ("LlamaForCausalLM", "0.5.23", [8, 2, 5], [3, 6, 9]),
        ("LlamaForCausalLM", "0.5.23", [2, 2, 5], [3, 6]),
        ("Qwen3ForCausalLM", "0.5.23", [1, 5, 8], [2, 6, 9]),
        ("SomeFutureForCausalLM", "0.5.23", [1, 5, 8], [2, 6, 9]),
        ("DeepseekV3ForCausalLM", "0.5.23", [1, 5, 8], [2, 6, 9]),
        ("DeepseekV3ForCausalLM", "0.5.23", [2, 5, 8], [2, 5, 8]),
        ("DeepseekV3ForCausalLM", "0.5.23", [0, 5, 8], [0, 5, 8]),
        ("DeepseekV3ForCausalLM", "0.5.9", [2, 5, 8], [3, 6, 9]),
        ("DeepseekV3ForCausalLM", "0.5.12.post1", [2, 5, 8], [3, 6, 9]),
        ("DeepseekV3ForCausalLM", "0.5.13.post1", [2, 5, 8], [2, 5, 8]),
        ("Glm4MoeLiteForCausalLM", None, [2, 5, 8], [2, 5, 8]),
        ("GptOssForCausalLM", "0.5.23", [2, 6, 12], [2, 6, 12]),
        ("GptOssForCausalLM", "0.5.23", [2, 6, 10], [3, 7, 11]),
        ("GptOssForCausalLM", "0.5.15.post1", [2, 6, 11], [3, 7]),
        ("Gemma3ForCausalLM", "0.5.23", [2, 6, 11], [3, 7, 12]),
        ("LlamaForCausalLM", "0.5.23", [2, 6, 11], [3, 7]),
    ],
)
def test_ids_are_read_as_the_model_class_reads_them(
    architecture: str, version: str | None, ids: list[int], depths: list[int]
) -> None:
    assert depths_of(architecture, ids, 12, version) == depths


def test_requested_depths_keep_the_order_and_the_unreachable() -> None:
    assert requested_depths("LlamaForCausalLM", [11, -2, 3], 12, "0.5.23") == [12, -1, 4]


def test_no_ids_mean_the_models_default() -> None:
    assert depths_of("LlamaForCausalLM", None, 12) == [2, 6, 9]
    assert depths_of("MiniMaxM3SparseForConditionalGeneration", None, 12) == [3, 7, 10]


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM"])
def test_ids_found_for_depths_lead_back_to_them(architecture: str) -> None:
    for depths in itertools.combinations(range(9), 3):
        reach = ids_for(architecture, depths, 9, "0.5.23")
        assert reach.ids is not None
        assert depths_of(architecture, reach.ids, 9, "0.5.23") == list(depths)


def test_the_common_convention_is_preferred() -> None:
    assert ids_for("LlamaForCausalLM", [3, 31, 59], 61).ids == [2, 30, 58]
    assert ids_for("DeepseekV3ForCausalLM", [2, 31, 59], 61).ids == [1, 30, 58]


def test_deepseek_is_given_inputs_when_outputs_would_be_misread() -> None:
    assert ids_for("DeepseekV3ForCausalLM", [3, 31, 59], 61, "0.5.23").ids == [3, 31, 59]
    assert ids_for("DeepseekV3ForCausalLM", [3, 31, 59], 61, "0.5.9").ids == [2, 30, 58]


def test_a_first_id_that_would_be_misread_goes_behind_another() -> None:
    ids = ids_for("DeepseekV3ForCausalLM", [1, 4, 7], 9, "0.5.23").ids
    assert ids is not None
    assert ids[0] != 1
    assert depths_of("DeepseekV3ForCausalLM", ids, 9, "0.5.23") == [1, 4, 7]


def test_unreachable_depths_say_why() -> None:
    last = ids_for("LlamaForCausalLM", [3, 12], 12, "0.5.23")
    assert last.ids is None
    assert "last layer" in last.reason
    alone = ids_for("DeepseekV3ForCausalLM", [1], 12, "0.5.23")
    assert alone.ids is None
    assert "first id" in alone.reason
    beyond = ids_for("LlamaForCausalLM", [3, 13], 12, "0.5.23")
    assert beyond.ids is None
    assert "12 layers" in beyond.reason


@pytest.mark.parametrize(
    ("text", "number"),
    [("0.5.13.post1", (0, 5, 13, 1)), ("v0.5.9", (0, 5, 9)), ("0.6", (0, 6, 0)), ("dev", None), (None, None)],
)
def test_versions_are_read(text: str | None, number: tuple[int, ...] | None) -> None:
    assert parse_version(text) == number
