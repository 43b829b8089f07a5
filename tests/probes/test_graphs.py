"""Capture inside graphs, with the recorder, ring and writer of a GPU and a graph that is a Python function.

A backend here keeps what it was given to capture and runs it again at each replay, as a CUDA graph runs its
kernels again. Letters: R rows of a graph, n rows in use, W width.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hsprobe.probes.sglang.graphs import Graphs
from hsprobe.probes.sglang.recorder import Recorder
from hsprobe.probes.sglang.sampling import Sampling
from hsprobe.probes.sglang.settings import SITES, Settings
from hsprobe.trace.blocks import Expander
from hsprobe.trace.place import ARMED
from hsprobe.trace.spool import Record, SpoolReader

W = 24
PLACE = {"tp": 0, "pp": 0, "dp": 0, "attn_tp": 0, "attn_tp_size": 1, "rank": 0}


@dataclass(frozen=True)
class Key:
    """SGLang's ``ShapeKey``."""

    size: int
    variant_label: str | None = None


class Backend:
    """SGLang's backend of CUDA graphs, with its two methods."""

    capturing = False

    def __init__(self) -> None:
        self.graphs: dict[Key, object] = {}

    def capture_one(self, key: Key, forward, *, fails: bool = False) -> None:
        forward()
        type(self).capturing = True
        try:
            if fails and key.variant_label is not None:
                raise MemoryError("no room for a second graph")
            forward()
        finally:
            type(self).capturing = False
        self.graphs[key] = forward

    def replay(self, key: Key) -> str:
        if key.variant_label is None:
            return "graph"
        type(self).capturing = True
        try:
            self.graphs[key]()
        finally:
            type(self).capturing = False
        return "graph with copies"


class Rig:
    """A recorder with one backend; its graphs read `hidden_RW`, `ids_R`, `positions_R`."""

    def __init__(self, folder: Path, rows: int, per_request: int = 1, **settings) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.recorder = Recorder(Settings(folder, frozenset(SITES), None, **settings))
        self.graphs = Graphs(self.recorder, settings.get("device_memory", 1 << 20), lambda: Backend.capturing)
        self.recorder.graphs = self.graphs
        self.backend = Backend()
        self.rows, self.per_request = rows, per_request
        self.hidden_RW = torch.zeros(rows, W, dtype=torch.bfloat16)
        self.ids_R = torch.zeros(rows, dtype=torch.int32)
        self.positions_R = torch.zeros(rows, dtype=torch.int64)
        self.recorder._open = self._open

    def _open(self, runner) -> None:
        from hsprobe.probes.sglang.pressure import Pressure
        from hsprobe.probes.sglang.ring import Ring
        from hsprobe.probes.sglang.spooling import Spooler
        from hsprobe.probes.sglang.staging import Stage

        recorder = self.recorder
        recorder._place = PLACE
        recorder._armed_path = str(self.folder / ARMED)
        ring = Ring(recorder.settings.memory, pinned=False)
        spooler = Spooler(self.folder / "rank-0.spool", recorder.settings.max_bytes, ring)
        recorder.stage = Stage(spooler, ring, Pressure(recorder.sampling.on_pressure))

    def model(self) -> None:
        """The forward that is captured: two sites, one of them twice as wide and in two parts, and labels."""
        recorder = self.recorder
        graph = recorder.current(draft=False)
        if graph is None:
            return
        recorder.take(graph, "layer/003", self.hidden_RW, site="layer", depth=3)
        recorder.take(graph, "aux", [self.hidden_RW, -self.hidden_RW], site="aux", depths=[3, 4], chunks=2)
        last_BW = self.hidden_RW[self.per_request - 1 :: self.per_request]
        recorder.take(graph, "stored", last_BW, site="stored", last=True)
        recorder.labels(self.ids_R, self.positions_R)

    def capture(self, **more) -> None:
        key = Key(self.rows // self.per_request)
        self.graphs.capture_one(Backend.capture_one, self.backend, key, self.model, **more)

    def arm(self, asked: str = "") -> None:
        (self.folder / ARMED).write_text(asked)

    def run(self, rids: list[str], mode: str = "TARGET_VERIFY", seed: int = 0) -> tuple[str, torch.Tensor]:
        """One step of a batch of these requests: its rows in the static buffers, junk behind them."""
        n = len(rids) * self.per_request
        generator = torch.Generator().manual_seed(seed)
        self.hidden_RW.copy_(torch.randn(self.rows, W, generator=generator))
        self.ids_R.copy_(torch.randint(0, 99, (self.rows,), generator=generator))
        self.positions_R.copy_(torch.arange(self.rows) + seed)
        expected = self.hidden_RW[:n].clone()
        requests = [SimpleNamespace(rid=rid, origin_input_ids=[1, 2], finished=lambda: False) for rid in rids]
        batch = SimpleNamespace(
            forward_mode=SimpleNamespace(name=mode),
            rids=rids,
            input_ids=self.ids_R[:n].clone(),
            positions=self.positions_R[:n].clone(),
            capture_hidden_mode=None,
        )
        runner = SimpleNamespace(is_draft_worker=False)
        self.recorder.runners = self.recorder.runners or [runner]
        self.recorder.step(requests)
        self.recorder.begin(runner, batch)
        key = Key(self.rows // self.per_request)
        ran = self.graphs.replay(Backend.replay, self.backend, key)
        self.recorder.end()
        # The next pass overwrites the buffers that graphs share.
        self.hidden_RW.fill_(float("nan"))
        return ran, expected

    def records(self, seconds: float = 5.0) -> list[Record]:
        """Ordinary records, once the writer says that it has written all."""
        deadline = time.monotonic() + seconds
        path = self.folder / "rank-0.spool"
        while time.monotonic() < deadline:
            found = list(SpoolReader(path)) if path.exists() else []
            if found and found[-1].kind == "idle":
                expander = Expander()
                return [one for record in found for one in expander.expand(record)]
            time.sleep(0.02)
        raise AssertionError("the writer did not come to rest")


def tensors(records: list[Record], name: str) -> list[Record]:
    return [r for r in records if r.kind == "tensor" and r.header["name"] == name]


def bits(record: Record) -> torch.Tensor:
    return torch.frombuffer(bytearray(record.payload), dtype=torch.bfloat16).reshape(record.header["shape"])


def test_a_server_that_is_not_armed_replays_the_graph_without_copies(tmp_path):
    rig = Rig(tmp_path, 4)
    rig.capture()
    assert rig.run(["a"])[0] == "graph"
    rig.arm()
    assert rig.run(["a"])[0] == "graph with copies"
    (tmp_path / ARMED).unlink()
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
    assert [p["nth"] - passes[0]["nth"] for p in passes] == list(range(6))
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


def test_a_checked_capture_carries_a_second_reading(tmp_path):
    import zlib

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
