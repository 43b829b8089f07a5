"""Wirings planted on the real server are named, with ids that mend them."""

import json
import re

import pytest
import release
from serving import Captured, Configuration, run_hsprobe

TRAINED_ON = (1, 3, 5)
SHORT = ("--max-new-tokens", "8")


def served(kitchen, ids: tuple[int, ...], target: str = "llama", *options: str) -> Captured:
    captured = kitchen.capture(Configuration(target=target, ids=ids, options=(*SHORT, *options)))
    assert captured.returncode == 0, captured.stderr
    return captured


def diff(train, infer, *, expected: int) -> dict:
    done = run_hsprobe("diff", train, infer, "--format", "json")
    assert done.returncode == expected, done.stdout + done.stderr
    return json.loads(done.stdout)


def ids_to_set(report: dict) -> list[int]:
    """The ids after the arrow of the only finding's mend."""
    (finding,) = report["findings"]
    return json.loads(re.search(r"->\s*(\[.*?\])", finding["mend"]["change"])[1])


@pytest.mark.parametrize(
    ("ids", "options", "code", "words"),
    [
        pytest.param(
            (-1, 3, 5),
            (),
            "LAYER_SET",
            "chunk 0 carries the embedding",
            id="embedding-in-chunk-0",
            marks=release.embeds_llama,
        ),
        pytest.param((0, 2, 4), (), "LAYER_SHIFT", "1 layer too early", id="all-one-too-low"),
        pytest.param((2, 4, 6), (), "LAYER_SHIFT", "1 layer too late", id="all-one-too-high"),
        pytest.param((1, 4, 5), (), "LAYER_SET", "chunk 1", id="one-chunk-wrong"),
    ],
)
def test_wrong_ids_are_named_with_the_ids_to_set(kitchen, ids, options, code, words):
    captured = served(kitchen, ids, "llama", *options)
    report = diff(kitchen.reference("llama", "1,3,5"), captured.trace, expected=1)
    (finding,) = report["findings"]
    assert finding.get("name", finding["code"]) == code
    text = " ".join([finding["title"], *finding["evidence"]])
    assert words in text
    assert finding["confidence"] > 0.99
    assert ids_to_set(report) == list(TRAINED_ON)
    assert str(captured.draft / "config.json") in " ".join(finding["mend"]["steps"])


def test_chunks_swapped_in_the_training_dump_are_told_from_wrong_ids(kitchen):
    captured = kitchen.capture(Configuration(overlap=release.OVERLAPS))
    report = diff(kitchen.reference("llama", "3,1,5"), captured.trace, expected=1)
    (finding,) = report["findings"]
    assert finding.get("name", finding["code"]) == "CONCAT"
    assert finding["chunks"] == [0, 1]


def test_right_wiring_has_no_finding(kitchen):
    captured = kitchen.capture(Configuration(overlap=release.OVERLAPS))
    report = diff(kitchen.reference("llama", "1,3,5"), captured.trace, expected=0)
    assert report["findings"] == []
    assert [chunk["state"] for chunk in report["chunks"]] == ["ok"] * 3


def test_the_whole_reference_confirms_every_depth(kitchen):
    captured = kitchen.capture(Configuration(overlap=release.OVERLAPS))
    assert diff(kitchen.reference("llama"), captured.trace, expected=0)["findings"] == []


@release.embeds_no_llama
def test_an_embedding_in_chunk_0_is_named_where_the_target_is_a_qwen3(kitchen):
    """The founding case on a release in which a Llama cannot hand over its embedding."""
    captured = served(kitchen, (-1, 3, 5), "qwen3")
    report = diff(kitchen.reference("qwen3", "1,3,5"), captured.trace, expected=1)
    (finding,) = report["findings"]
    assert finding.get("name", finding["code"]) == "LAYER_SET"
    assert "chunk 0 carries the embedding output (depth 0)" in finding["title"]
    assert ids_to_set(report) == list(TRAINED_ON)


@release.reads_outputs
def test_deepseek_ids_name_layer_outputs_and_a_draft_trained_for_later_releases_is_told(kitchen):
    """From 0.5.13 on the same ids name layer inputs, unless the first is 1: depths 2, 3, 4."""
    captured = kitchen.capture(Configuration(target="deepseek", ids=release.DEEPSEEK_IDS, options=SHORT))
    assert captured.returncode == 0, captured.stderr
    assert diff(kitchen.reference("deepseek", "2,3,4"), captured.trace, expected=0)["findings"] == []
    report = diff(kitchen.reference("deepseek", "1,2,3"), captured.trace, expected=1)
    (finding,) = report["findings"]
    assert finding.get("name", finding["code"]) == "LAYER_SHIFT"
    assert "1 layer too late: served depths 3, 4, 5, trained on 2, 3, 4" in finding["title"]
    assert ids_to_set(report) == [1, 2, 3]


@release.looks_at_first_id
def test_deepseek_ids_meant_as_layer_outputs_are_read_one_too_low_and_the_named_ids_mend_it(kitchen):
    meant = ",".join(map(str, release.DEEPSEEK_IDS))
    captured = kitchen.capture(Configuration(target="deepseek", ids=release.DEEPSEEK_IDS))
    train = kitchen.reference("deepseek", meant)
    report = diff(train, captured.trace, expected=1)
    (finding,) = report["findings"]
    assert finding.get("name", finding["code"]) == "LAYER_SHIFT"
    assert "first id" in " ".join([finding["title"], *finding["evidence"], *finding["mend"]["steps"]])
    mended = served(kitchen, tuple(ids_to_set(report)), "deepseek")
    assert diff(train, mended.trace, expected=0)["findings"] == []


@pytest.mark.parametrize("site", ["aux", "draft.input"])
def test_capture_of_one_site_alone_finds_the_fault_and_says_what_it_cannot_tell(kitchen, site):
    captured = served(kitchen, (2, 4, 6), "llama", "--sites", site)
    done = run_hsprobe("diff", kitchen.reference("llama", "1,3,5"), captured.trace)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"--sites [\w.,]*\blayer\b", done.stdout)
    right = served(kitchen, TRAINED_ON, "llama", "--sites", site)
    assert diff(kitchen.reference("llama", "1,3,5"), right.trace, expected=0)["findings"] == []


def test_bfloat16_server_raises_no_alarm_and_keeps_its_bits(kitchen):
    from hsprobe.trace.reader import Trace

    configuration = Configuration(arguments=("--dtype=bfloat16",), options=SHORT)
    captured = kitchen.capture(configuration)
    assert captured.returncode == 0, captured.stderr
    with Trace.open(captured.trace) as trace:
        assert trace.ranks[0].tensors["aux"].dtype == "bfloat16"
    report = diff(kitchen.reference("llama", "1,3,5"), captured.trace, expected=0)
    assert report["findings"] == []
