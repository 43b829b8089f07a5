"""Capture inside graphs: the recorder, ring and writer of a GPU, and a graph that is a Python function."""

import zlib
from types import SimpleNamespace

import pytest
import torch
from rig import Backend, Key, Rig, bits, tensors

from hsprobe.probes.sglang.recorder import STEP_BITS
from hsprobe.probes.sglang.sampling import Sampling
from hsprobe.trace.blocks import Expander
from hsprobe.trace.spool import SpoolReader


def test_a_server_that_is_not_armed_replays_the_graph_without_copies(tmp_path):
    rig = Rig(tmp_path, 4)
    rig.capture()
    assert rig.run(["a"])[0] == "graph"
    rig.arm()
    assert rig.run(["a"])[0] == "graph with copies"
    rig.disarm()
    assert rig.run(["a"])[0] == "graph"
    assert len([r for r in rig.records() if r.kind == "pass"]) == 1


def test_every_replay_is_recorded_bit_for_bit_with_only_the_rows_in_use(tmp_path):
    rig = Rig(tmp_path, 8, per_request=2)
    rig.capture()
    rig.arm()
    expected = [rig.run([f"r{k}" for k in range(1 + i % 4)], seed=i)[1] for i in range(40)]
    records = rig.records()
    layers, auxes, stored = (tensors(records, name) for name in ("layer/003", "aux", "stored"))
    passes = [r for r in records if r.kind == "pass"]
    assert len(layers) == len(auxes) == len(stored) == len(passes) == 40
    for i, (one, layer, aux, last, want) in enumerate(
        zip(passes, layers, auxes, stored, expected, strict=True)
    ):
        assert one.header["graph"] is True
        assert one.header["n_rows"] == len(want)
        labels = torch.frombuffer(bytearray(one.payload), dtype=torch.int64).reshape(2, -1)
        assert labels[1].tolist() == list(range(i, i + len(want)))
        assert torch.equal(bits(layer), want)
        assert torch.equal(bits(aux), torch.cat([want, -want], dim=1))
        assert torch.equal(bits(last), want[1::2])
        assert last.header["rows"] == "last"
        assert (layer.header["depth"], aux.header["depths"], aux.header["chunks"]) == (3, [3, 4], 2)


def test_a_draft_decode_graph_is_several_passes(tmp_path):
    rig = Rig(tmp_path, 2)
    draft = SimpleNamespace(is_draft_worker=True)
    steps = SimpleNamespace(forward_mode=SimpleNamespace(name="DECODE"))

    def chain() -> None:
        for k in range(3):
            rig.recorder.begin(draft, steps)
            graph = rig.recorder.current(draft=True)
            if graph is not None:
                rig.recorder.take(graph, "draft.recycled", rig.hidden_RW + k, site="draft.recycled")
                rig.recorder.labels(rig.ids_R + k, rig.positions_R + k)
            rig.recorder.end()

    rig.graphs.capture_one(Backend.capture_one, rig.backend, Key(2), chain)
    rig.arm()
    _, first = rig.run(["a"], mode="DECODE")
    rig.run(["a"], mode="DECODE", seed=1)
    records = rig.records()
    passes = [r.header for r in records if r.kind == "pass"]
    first_pass = passes[0]["pass"]
    assert [p["pass"] for p in passes] == list(range(first_pass, first_pass + 6))
    # Each step of the scheduler counts anew.
    in_its_step = [step << STEP_BITS | forward for step in range(2) for forward in range(3)]
    assert [p["nth"] - passes[0]["nth"] for p in passes] == in_its_step
    assert {p["phase"] for p in passes} == {"draft_decode"}
    for k, record in enumerate(tensors(records, "draft.recycled")[:3]):
        assert record.header["pass"] == first_pass + k
        assert torch.equal(bits(record), first + k)


def test_chosen_requests_are_recorded_and_others_leave_no_row(tmp_path):
    rig = Rig(tmp_path, 8, per_request=2)
    rig.capture()
    rig.arm('{"requests": "vip-*"}')
    _, want = rig.run(["x", "vip-1", "y", "vip-2"])
    assert rig.run(["x", "y"])[0] == "graph"
    records = rig.records()
    (one,) = (r for r in records if r.kind == "pass")
    assert (one.header["rids"], one.header["n_rows"]) == (["vip-1", "vip-2"], 4)
    (layer,), (last,) = tensors(records, "layer/003"), tensors(records, "stored")
    assert torch.equal(bits(layer), want[[2, 3, 6, 7]])
    assert torch.equal(bits(last), want[[3, 7]])
    (missing,) = (r.header for r in records if r.kind == "missing")
    assert (missing["passes"], missing["ranges"], missing["asked"]) == (1, [[2, 2]], True)


def test_every_nth_step_replays_the_graph_with_copies_and_the_others_do_not(tmp_path):
    rig = Rig(tmp_path, 4, sampling=Sampling(every=3))
    rig.capture()
    rig.arm()
    ran = [rig.run(["a"], seed=i)[0] for i in range(7)]
    assert [i for i, what in enumerate(ran) if what == "graph with copies"] == [0, 3, 6]
    assert [r.header["pass"] for r in rig.records() if r.kind == "pass"] == [1, 4, 7]


@pytest.mark.parametrize(("memory", "gone"), [(800, ["layer"]), (1, ["every site", "layer", "mid"])])
def test_copies_that_find_no_room_on_the_device_are_named(tmp_path, memory, gone):
    rig = Rig(tmp_path, 4, device_memory=memory)
    rig.capture()
    rig.arm()
    rig.run(["a"])
    records = rig.records()
    reasons = " ".join(r.header["reason"] for r in records if r.kind == "gap")
    assert "no room for" in reasons
    assert "HSPROBE_DEVICE_MEMORY" in reasons
    assert all(site in reasons for site in gone)
    assert not tensors(records, "layer/003")
    assert bool(tensors(records, "aux")) == (memory != 1)


def test_a_second_graph_that_cannot_be_captured_costs_the_recording_not_the_server(tmp_path):
    rig = Rig(tmp_path, 4)
    rig.capture(fails=True)
    rig.arm()
    assert rig.run(["a"])[0] == "graph"
    reasons = [r.header["reason"] for r in rig.records() if r.kind == "gap"]
    assert any("no room for a second graph" in reason for reason in reasons)
    assert any("without the probes' copies" in reason for reason in reasons)


def test_a_graph_in_which_a_copy_is_missing_is_not_recorded(tmp_path):
    rig = Rig(tmp_path, 4)
    take, calls = rig.recorder.take, []

    def sometimes(labelled, name, *args, **kwargs):
        calls.append(name)
        if calls.count("aux") < 2 or name != "aux":
            take(labelled, name, *args, **kwargs)

    rig.recorder.take = sometimes
    rig.capture()
    rig.arm()
    assert rig.run(["a"])[0] == "graph"
    records = rig.records()
    assert any("a copy is missing" in r.header["reason"] for r in records if r.kind == "gap")
    assert not tensors(records, "layer/003")


def test_a_model_run_for_capturing_leaves_nothing_in_the_pass_under_way(tmp_path):
    rig = Rig(tmp_path, 4)
    rig.capture()
    rig.arm()
    recapture = rig.model
    rig.model = lambda: recapture()
    rig.run(["a"])
    before = rig.recorder.under_way
    rig.capture()
    assert rig.recorder.under_way is before
    assert len(tensors(rig.records(), "aux")) == 1


def test_a_graph_that_cannot_hold_copies_runs_and_is_a_gap(tmp_path):
    """As in SGLang 0.5.9, where the classes that run graphs capture them too."""
    rig = Rig(tmp_path, 4)
    rig.arm()
    ran = []
    for _ in range(2):
        rig.step(
            ["a"], 1, "DECODE", lambda: ran.append(rig.graphs.closed_replay(lambda runner: "graph", "runner"))
        )
    assert ran == ["graph", "graph"]
    records = rig.records()
    gaps = [r.header for r in records if r.kind == "gap"]
    assert [(gap["pass"], gap["site"]) for gap in gaps] == [(1, "graphs"), (2, "graphs")]
    assert all("--disable-cuda-graph" in gap["reason"] for gap in gaps)
    assert [r.header["graph"] for r in records if r.kind == "pass"] == [True, True]


def test_what_such_a_class_runs_to_capture_leaves_nothing_in_the_pass_under_way(tmp_path):
    rig = Rig(tmp_path, 4)
    rig.arm()
    seen = []

    def forward() -> None:
        rig.graphs.closed_capture(lambda: seen.append(rig.recorder.current(draft=False)))
        seen.append(rig.recorder.current(draft=False))

    rig.step(["a"], 1, "DECODE", forward)
    assert seen[0] is None
    assert seen[1] is not None


def test_a_checked_capture_carries_a_second_reading(tmp_path):
    rig = Rig(tmp_path, 4)
    rig.capture()
    rig.arm('{"check": true}')
    for i in range(5):
        rig.run(["a", "b"], seed=i)
    rig.records()
    seen = 0
    for record in SpoolReader(tmp_path / "rank-0.spool"):
        for one in record.header.get("passes", []):
            for (first, size), second in zip(one["pieces"], one["second"], strict=True):
                assert zlib.crc32(record.payload[first : first + size]) == second
                seen += 1
    assert seen == 5


def test_a_capture_that_follows_at_once_is_another(tmp_path):
    rig = Rig(tmp_path, 4)
    rig.capture()
    rig.arm('{"requests": "vip-*"}')
    rig.run(["vip-1", "a"])
    rig.records()
    before = rig.spool.stat().st_size
    # Between the two the server has no step in which it could see that the first has ended.
    rig.disarm()
    rig.arm()
    rig.run(["vip-1", "a"])
    rig.records()
    expander = Expander()
    records = [one for record in SpoolReader(rig.spool, before) for one in expander.expand(record)]
    assert [r.header["rids"] for r in records if r.kind == "pass"] == [["vip-1", "a"]]
    assert sorted(r.header["rid"] for r in records if r.kind == "request") == ["a", "vip-1"]


def test_of_a_graph_without_what_was_asked_for_nothing_is_left_behind(tmp_path):
    rig = Rig(tmp_path, 4)
    rig.graphs.capture_one(
        Backend.capture_one, rig.backend, Key(4), lambda: rig.recorder.labels(rig.ids_R, rig.positions_R)
    )
    rig.arm()
    assert rig.run(["a"])[0] == "graph"
    assert rig.run(["a"])[0] == "graph"
    kinds = {record.kind for record in rig.records()}
    assert not kinds & {"pass", "tensor", "gap", "missing"}
