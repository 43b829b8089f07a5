"""Two ranks of tensor parallelism: each one's record equals transformers', and they equal each other."""

import os
import signal

import numpy as np
import pytest
from release import DEEPSEEK_IDS, DEPTHS, FUSES
from safetensors.numpy import load_file
from serving import CAPTURE_SECONDS, Configuration
from states import Phase, by_context, ranks_of, rows_of, worst_relative_error
from test_lifecycle import LONG, processes_with, start_capture, wait_for_spool

from hsprobe.trace.reader import Trace
from hsprobe.trace.schema import Model

LAYERS = 8
TP2 = {
    "llama-steps3": Configuration(tp=2),
    f"deepseek-steps1{'-fused' if FUSES else ''}": Configuration(
        target="deepseek", ids=DEEPSEEK_IDS, steps=1, tp=2, fused=FUSES
    ),
}
SHARES = ("draft.qkv", "draft.context", "draft.gate_up")
FP32_ROUNDING = 5e-6
TARGET_PHASES = (Phase.PREFILL, Phase.VERIFY)


@pytest.fixture(scope="module", params=TP2)
def served(request, kitchen):
    configuration = TP2[request.param]
    captured = kitchen.capture(configuration)
    assert captured.returncode == 0, captured.stderr
    return captured, kitchen.reference(configuration.target), configuration


def expected_sites(configuration: Configuration) -> set[str]:
    sites = {f"layer/{depth:03d}" for depth in range(LAYERS + 1)}
    sites |= {f"mid/{depth:03d}" for depth in range(LAYERS)}
    sites |= {"embed", "aux", "logits_processor.input", "logits_processor.stored", "draft.input"}
    sites |= {"draft.fc", "draft.embed", "draft.mixed", "draft.attention", *SHARES}
    sites |= {"draft.layer", "draft.final", "draft.logits"}
    return sites | ({"draft.recycled"} if configuration.steps > 1 else set())


def test_both_ranks_record_every_site_with_their_place(served):
    captured, _, configuration = served
    with Trace.open(captured.trace) as trace:
        assert trace.gaps == []
        assert trace.state == "complete"
        assert [rank.index for rank in trace.ranks] == [0, 1]
        for place, rank in enumerate(trace.ranks):
            assert {"tp": place, "attn_tp": place, "pp": 0, "dp": 0}.items() <= rank.coords.items()
            sizes = {"tp_size": 2, "attn_tp_size": 2, "pp_size": 1, "dp_size": 1}
            assert sizes.items() <= rank.coords.items()
            assert rank.layers == (0, LAYERS)
            assert set(rank.tensors) == expected_sites(configuration)
            spread = {name: tensor.spread for name, tensor in rank.tensors.items() if tensor.spread}
            assert spread == dict.fromkeys(SHARES, "tp_columns")


def test_every_probe_of_both_ranks_shows_that_it_sees_what_it_says(served):
    captured, _, _ = served
    with Trace.open(captured.trace) as trace:
        shown = trace.provenance["self_test"]
    assert {"labels", "layer", "mid", "embed", "aux", "logits_processor.input", "draft.fc"} <= set(shown)
    assert shown == {site: {"state": "proven"} for site in shown}


def test_sums_are_fused_where_that_was_asked_for(served):
    """And so what the other tests find at the layers was taken from the fused kernel's output."""
    captured, _, configuration = served
    fused = captured.trace.with_suffix(".fused")
    assert fused.exists() == configuration.fused
    if configuration.fused:
        assert sorted(fused.read_text().split()) == ["0", "1"]


@pytest.mark.parametrize("rank", [0, 1])
def test_target_states_of_each_rank_equal_the_reference(served, rank):
    captured, reference, _ = served
    places = [
        *((f"layer/{d:03d}",) * 2 for d in range(LAYERS + 1)),
        *((f"mid/{d:03d}",) * 2 for d in range(LAYERS)),
    ]
    places += [("embed", "layer/000"), ("logits_processor.input", "final")]
    for name, expected_name in places:
        expected = by_context(rows_of(reference, expected_name))
        for phase in TARGET_PHASES:
            error, count = worst_relative_error(rows_of(captured.trace, name, rank=rank), expected, phase)
            assert count >= 70, (name, phase)
            assert error < FP32_ROUNDING, (name, phase)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_each_rank_hands_to_its_draft_equals_the_reference(served, rank):
    captured, reference, configuration = served
    depths = DEPTHS[configuration.target]
    chunks = [by_context(rows_of(reference, f"layer/{depth:03d}")) for depth in depths]
    expected = {context: np.concatenate([chunk[context] for chunk in chunks]) for context in chunks[0]}
    for name, phases in (
        ("aux", TARGET_PHASES),
        ("logits_processor.stored", TARGET_PHASES),
        ("draft.input", (Phase.PREFILL, Phase.DRAFT_EXTEND)),
    ):
        for phase in phases:
            error, count = worst_relative_error(rows_of(captured.trace, name, rank=rank), expected, phase)
            assert count >= 70, (name, phase)
            assert error < FP32_ROUNDING, (name, phase)


def test_passes_of_both_ranks_are_joined_row_for_row(served):
    captured, _, _ = served
    first, second = ranks_of(captured.trace)
    assert len(first.ids) > 10
    assert first.ids == second.ids
    assert len(set(first.ids)) == len(first.ids)
    assert {model for model, _ in first.ids} == {int(Model.TARGET), int(Model.DRAFT)}
    for column in first.rows:
        assert np.array_equal(first.rows[column], second.rows[column]), column


def test_replicas_are_equal_bit_for_bit(served):
    captured, _, configuration = served
    with Trace.open(captured.trace) as trace:
        for name in sorted(expected_sites(configuration)):
            first, second = (rank.tensors[name] for rank in trace.ranks)
            assert np.array_equal(first.row_index, second.row_index), name
            same = np.array_equal(first.read_raw(), second.read_raw())
            assert same == (name not in SHARES), name


def test_two_ranks_generate_the_references_tokens(served):
    captured, reference, _ = served
    with Trace.open(captured.trace) as two, Trace.open(reference) as alone:
        tokens = [[trace.requests.tokens(i).tolist() for i in range(4)] for trace in (two, alone)]
    assert sorted(tokens[0]) == sorted(tokens[1])


@pytest.mark.parametrize("rank", [0, 1])
def test_draft_states_of_each_rank_follow_from_the_drafts_own_weights(served, rank):
    captured, _, _ = served
    weights = load_file(captured.draft / "model.safetensors")
    states = {
        name: rows_of(captured.trace, name, rank=rank).values_NW
        for name in ("draft.input", "draft.fc", "draft.layer", "draft.final")
    }
    layer = states["draft.layer"]
    scale = 1 / np.sqrt((layer**2).mean(axis=1, keepdims=True) + 1e-6)
    for name, expected in (
        ("draft.fc", states["draft.input"] @ weights["fc.weight"].T),
        ("draft.final", layer * scale * weights["norm.weight"]),
    ):
        assert len(states[name]) >= 70
        assert np.abs(expected - states[name]).max() < 1e-4 * np.abs(expected).max(), name


def test_one_rank_alone_records_what_it_does_beside_the_other(kitchen):
    both = kitchen.capture(TP2["llama-steps3"])
    captured = kitchen.capture(Configuration(tp=2, options=("--max-new-tokens", "20", "--ranks", "1")))
    assert captured.returncode == 0, captured.stderr
    assert "1 rank," in captured.stdout
    with Trace.open(captured.trace) as trace:
        assert trace.gaps == []
        (rank,) = trace.ranks
        assert (rank.index, rank.coords["tp"], rank.coords["tp_size"]) == (1, 1, 2)
    for name in ("layer/004", "aux"):
        expected = by_context(rows_of(both.trace, name, rank=1))
        error, count = worst_relative_error(rows_of(captured.trace, name), expected, Phase.PREFILL)
        assert count >= 70
        assert error < FP32_ROUNDING


def capture_and_disturb(kitchen, folder, number: int, marker: str):
    """A long capture from two ranks; once both are at work, send rank 1's process a signal."""
    out = folder / "infer.h5"
    capture = start_capture(
        kitchen, out, kitchen.prompts(), "--max-new-tokens", LONG, "--sites", "layer,aux", "--depths", "4",
        marker=marker, configuration=TP2["llama-steps3"],
    )  # fmt: skip
    process = None
    try:
        for place in (0, 1):
            spool = wait_for_spool(folder, 300_000, f"hsprobe-*/*tp{place}-*.spool")
            process = int(spool.stem.rpartition("-")[2])
        os.kill(process, number)
        _, stderr = capture.communicate(timeout=CAPTURE_SECONDS)
    finally:
        if capture.poll() is None:
            capture.kill()
    assert capture.returncode == 2, stderr
    assert processes_with(marker) == []
    return out, process, stderr


def said(stderr: str) -> str:
    """The one sentence, apart from progress and from the server's log."""
    (sentence,) = [line for line in stderr.splitlines() if line.startswith("hsprobe: ")]
    return sentence


def test_a_killed_rank_is_named_and_leaves_a_gap_and_no_wrong_row(kitchen, tmp_path):
    out, process, stderr = capture_and_disturb(kitchen, tmp_path, signal.SIGKILL, f"tp-killed-{os.getpid()}")
    assert f"process {process} (tp 1) ended in the middle of the capture" in said(stderr)
    assert_prefix_of_the_other(out)


def test_a_stopped_rank_is_named_and_leaves_a_gap_and_no_wrong_row(kitchen, tmp_path):
    out, process, stderr = capture_and_disturb(kitchen, tmp_path, signal.SIGSTOP, f"tp-stopped-{os.getpid()}")
    sentence = said(stderr)
    assert f"process {process} (tp 1) has been stopped for 5 s" in sentence
    assert f"kill -CONT {process}" in sentence
    assert_prefix_of_the_other(out)


def assert_prefix_of_the_other(out) -> None:
    """What rank 1 recorded is what rank 0 did, up to where it broke off; the rest is a gap."""
    first, second = ranks_of(out)
    common = min(len(first.ids), len(second.ids))
    assert common > 5
    assert first.ids[:common] == second.ids[:common]
    with Trace.open(out) as trace:
        assert trace.state == "recovered" or any("missing" in gap["reason"] for gap in trace.gaps)
        assert trace.gaps != []
        tensors = [rank.tensors["aux"] for rank in trace.ranks]
        rows = min(len(tensor) for tensor in tensors)
        assert rows > 20
        assert np.array_equal(tensors[0].read_raw(slice(0, rows)), tensors[1].read_raw(slice(0, rows)))
        assert np.array_equal(tensors[0].row_index[:rows], tensors[1].row_index[:rows])
