"""What is recorded from a real server equals what transformers computes, site by site and phase by phase."""

import numpy as np
import pytest
import release
from release import DEEPSEEK_IDS, DEPTHS, OVERLAPS
from serving import Configuration
from states import Phase, RowStatus, by_context, names_of, rows_of, worst_relative_error

from hsprobe.trace.reader import Trace

LAYERS = 8

_OVERLAP = "-overlap" if OVERLAPS else ""
CONFIGURATIONS = {
    f"llama-steps3{_OVERLAP}": Configuration(overlap=OVERLAPS),
    "llama-steps1": Configuration(steps=1),
    "deepseek-steps3": Configuration(target="deepseek", ids=DEEPSEEK_IDS),
    f"deepseek-steps1{_OVERLAP}": Configuration(
        target="deepseek", ids=DEEPSEEK_IDS, steps=1, overlap=OVERLAPS
    ),
}
FP32_ROUNDING = 5e-6


@pytest.fixture(scope="module", params=CONFIGURATIONS)
def served(request, kitchen):
    configuration = CONFIGURATIONS[request.param]
    captured = kitchen.capture(configuration)
    assert captured.returncode == 0, captured.stderr
    return captured, kitchen.reference(configuration.target), configuration


def test_every_depth_equals_the_reference_in_prefill_and_verify(served):
    captured, reference, _ = served
    depths = [f"layer/{depth:03d}" for depth in range(LAYERS + 1)]
    for name in [*depths, *(f"mid/{depth:03d}" for depth in range(LAYERS))]:
        expected = by_context(rows_of(reference, name))
        for phase in (Phase.PREFILL, Phase.VERIFY):
            error, count = worst_relative_error(rows_of(captured.trace, name), expected, phase)
            assert count >= 70, (name, phase)
            assert error < FP32_ROUNDING, (name, phase)


def test_embedding_and_final_state_equal_the_reference(served):
    captured, reference, _ = served
    for name, expected_name in (("embed", "layer/000"), ("logits_processor.input", "final")):
        expected = by_context(rows_of(reference, expected_name))
        for phase in (Phase.PREFILL, Phase.VERIFY):
            error, count = worst_relative_error(rows_of(captured.trace, name), expected, phase)
            assert count >= 70
            assert error < FP32_ROUNDING, (name, phase)


def test_aux_and_what_the_draft_gets_are_the_depths_asked_for(served):
    captured, reference, configuration = served
    depths = DEPTHS[configuration.target]
    with Trace.open(captured.trace) as trace:
        assert list(trace.ranks[0].tensors["aux"].depths) == depths
    chunks = [by_context(rows_of(reference, f"layer/{depth:03d}")) for depth in depths]
    expected = {context: np.concatenate([chunk[context] for chunk in chunks]) for context in chunks[0]}
    for name, phases in (
        ("aux", (Phase.PREFILL, Phase.VERIFY)),
        ("logits_processor.stored", (Phase.PREFILL, Phase.VERIFY)),
        ("draft.input", (Phase.PREFILL, Phase.DRAFT_EXTEND)),
    ):
        for phase in phases:
            error, count = worst_relative_error(rows_of(captured.trace, name), expected, phase)
            assert count >= 70, (name, phase)
            assert error < FP32_ROUNDING, (name, phase)


def test_what_the_draft_gets_is_bit_for_bit_what_the_target_handed_over(served):
    captured, _, _ = served
    aux, given = rows_of(captured.trace, "aux"), rows_of(captured.trace, "draft.input")
    handed_over = {}
    for context, values in zip(aux.context, aux.values_NW, strict=True):
        handed_over.setdefault(int(context), []).append(values)
    compared = 0
    for context, values in zip(given.context, given.values_NW, strict=True):
        if int(context):
            assert any(np.array_equal(values, candidate) for candidate in handed_over[int(context)])
            compared += 1
    assert compared >= 140


def test_every_site_has_rows_and_nothing_was_missed(served):
    captured, _, configuration = served
    expected = {f"layer/{depth:03d}" for depth in range(LAYERS + 1)} | {
        *(f"mid/{depth:03d}" for depth in range(LAYERS)),
        "embed", "aux", "logits_processor.input", "logits_processor.stored",
        "draft.input", "draft.fc", "draft.embed", "draft.mixed", "draft.qkv", "draft.context",
        "draft.attention", "draft.gate_up", "draft.layer", "draft.final", "draft.logits",
    }  # fmt: skip
    if configuration.steps > 1:
        expected.add("draft.recycled")
    assert names_of(captured.trace) == expected
    with Trace.open(captured.trace) as trace:
        assert trace.gaps == []
        assert trace.state == "complete"
        assert len(trace.requests.ids) == 4


def test_every_probe_shows_that_it_sees_what_it_says(served):
    captured, _, _ = served
    with Trace.open(captured.trace) as trace:
        shown = trace.provenance["self_test"]
        sites = {tensor.site for tensor in trace.ranks[0].tensors.values()}
    # Only first passes are looked at, and all of them may come before the first of the draft's own steps.
    late = {"draft.recycled"} - shown.keys()
    assert shown == {site: {"state": "proven"} for site in (sites | {"labels"}) - late}


def test_probes_leave_the_servers_tokens_as_they_are(served):
    captured, reference, _ = served
    with Trace.open(captured.trace) as served_trace, Trace.open(reference) as alone:
        ours = [served_trace.requests.tokens(i).tolist() for i in range(4)]
        assert sorted(ours) == sorted(alone.requests.tokens(i).tolist() for i in range(4))


def test_verify_rows_are_accepted_exactly_where_they_became_the_requests_tokens(served):
    captured, _, configuration = served
    rows = rows_of(captured.trace, "aux")
    verify = rows.phase == int(Phase.VERIFY)
    accepted = verify & (rows.status == int(RowStatus.ACCEPTED))
    rejected = verify & (rows.status == int(RowStatus.REJECTED))
    with Trace.open(captured.trace) as trace:
        generated = sum(
            len(trace.requests.tokens(i)) - int(trace.requests.prompt_len[i])
            for i in range(len(trace.requests.ids))
        )
        server_side = trace.provenance["requests"]
        passes = sum(request["spec_verify_ct"] for request in server_side)
    # Each generated token but a request's last is fed once; a pass feeds steps + 1 rows a request. Where
    # passes overlap whatever was asked for (0.5.15), one more feeds the last as well.
    fed = generated - len(server_side)
    assert accepted.sum() in ({fed} if release.NEWER else {fed, generated})
    assert rejected.sum() > 0
    assert verify.sum() >= passes * (configuration.steps + 1)
    assert len(set(rows.context[accepted].tolist())) == accepted.sum()


def test_draft_states_follow_from_one_another_by_the_drafts_own_weights(served):
    from safetensors.numpy import load_file

    captured, _, _ = served
    weights = load_file(captured.draft / "model.safetensors")
    layer, final = rows_of(captured.trace, "draft.layer"), rows_of(captured.trace, "draft.final")
    scale = 1 / np.sqrt((layer.values_NW**2).mean(axis=1, keepdims=True) + 1e-6)
    expected = layer.values_NW * scale * weights["norm.weight"]
    assert np.abs(expected - final.values_NW).max() < 1e-4 * np.abs(final.values_NW).max()
    fed, projected = rows_of(captured.trace, "draft.input"), rows_of(captured.trace, "draft.fc")
    expected = fed.values_NW @ weights["fc.weight"].T
    assert np.abs(expected - projected.values_NW).max() < 1e-4 * np.abs(projected.values_NW).max()
