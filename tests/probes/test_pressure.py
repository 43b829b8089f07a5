"""When the writer falls behind: what is dropped is counted and named, what is kept is whole and right."""

import os
import signal
import threading
from dataclasses import replace

import pytest
import torch
from rig import Rig, bits, tensors

from hsprobe.probes.sglang.pressure import RANGES_NAMED, Ledger, Pressure
from hsprobe.probes.sglang.ring import Ring
from hsprobe.probes.sglang.sampling import Sampling, from_environment
from hsprobe.probes.sglang.shared import RETURNED, Shared
from hsprobe.probes.sglang.writer import ALIGNMENT
from hsprobe.trace.spool import SpoolReader

KIB = 1 << 10


class Held:
    """A writer that is stopped, as on a disk that hangs, until it is set free."""

    def __init__(self, rig: Rig) -> None:
        self._pid = rig.writer()
        os.kill(self._pid, signal.SIGSTOP)
        self.free = False

    def set(self) -> None:
        self.free = True
        os.kill(self._pid, signal.SIGCONT)


def ring_of(capacity: int) -> tuple[Ring, Shared]:
    shared = Shared.create(1 << 12, capacity)
    return Ring(shared), shared


def missing(records):
    return [r.header for r in records if r.kind == "missing"]


class TestRing:
    def test_space_is_given_in_order_and_again_once_it_was_returned(self):
        ring, shared = ring_of(4 * ALIGNMENT)
        assert [ring.reserve(ALIGNMENT) for _ in range(5)] == [0, 64, 128, 192, None]
        shared.words[RETURNED] = 2 * ALIGNMENT
        assert ring.used == 2 * ALIGNMENT
        assert [ring.reserve(1), ring.reserve(ALIGNMENT), ring.reserve(1)] == [0, 64, None]

    def test_a_piece_is_never_cut_in_two_at_the_end(self):
        ring, shared = ring_of(4 * ALIGNMENT)
        assert ring.reserve(3 * ALIGNMENT) == 0
        shared.words[RETURNED] = ring.mark
        assert ring.reserve(2 * ALIGNMENT) == 0
        assert ring.used == 3 * ALIGNMENT
        shared.words[RETURNED] = ring.mark
        assert ring.used == 0
        assert ring.reserve(4 * ALIGNMENT) is None
        assert ring.fits(4 * ALIGNMENT)
        assert not ring.fits(4 * ALIGNMENT + 1)

    @pytest.mark.parametrize("seed", range(4))
    def test_pieces_in_use_never_overlap(self, seed):
        generator = torch.Generator().manual_seed(seed)
        ring, shared = ring_of(64 * ALIGNMENT)
        live: list[tuple[int, int, int]] = []
        for _ in range(3000):
            size = int(torch.randint(1, 20 * ALIGNMENT, (1,), generator=generator))
            offset = ring.reserve(size)
            if offset is None:
                assert live
                shared.words[RETURNED] = live.pop(0)[2]
                continue
            assert offset + size <= ring.capacity
            assert all(offset + size <= a or b <= offset for a, b, _ in live)
            live.append((offset, offset + size, ring.mark))


class TestDrop:
    def test_passes_without_room_are_counted_and_named_and_the_server_does_not_wait(self, tmp_path):
        rig = Rig(tmp_path, 4, memory=4 * KIB)
        rig.capture()
        rig.arm()
        rig.run(["a"])
        rig.records()
        go = Held(rig)
        expected = {number: rig.run(["a", "b", "c"], seed=number)[1] for number in range(2, 42)}
        go.set()
        records = rig.records()
        kept = [r.header["pass"] for r in records if r.kind == "pass"][1:]
        (gone,) = missing(records)
        assert 0 < len(kept) < 40
        assert gone["passes"] == 40 - len(kept)
        dropped = [n for first, last in gone["ranges"] for n in range(first, last + 1)]
        assert sorted(kept + dropped) == list(range(2, 42))
        assert "HSPROBE_MEMORY" in gone["reason"]
        assert not gone["asked"]
        for layer in tensors(records, "layer/003")[1:]:
            assert torch.equal(bits(layer), expected[layer.header["pass"]])

    def test_a_pass_that_finds_room_for_a_part_is_named_too(self, tmp_path):
        rig = Rig(tmp_path, 64, memory=64 * KIB)
        rig.arm()
        rig.eager(["a"], rows=8)
        rig.records()
        go = Held(rig)
        computed = rig.eager(["a"], rows=64, layers=20, width=64)
        go.set()
        records = rig.records()
        layers = [r for r in records if r.kind == "tensor" and r.header["pass"] == 2]
        assert 0 < len(layers) < 20
        for layer, state in zip(layers, computed, strict=False):
            assert torch.equal(bits(layer), state)
        assert [(m["passes"], m["ranges"]) for m in missing(records)] == [(1, [[2, 2]])]

    def test_what_can_never_fit_says_so(self, tmp_path):
        rig = Rig(tmp_path, 8, memory=KIB)
        rig.arm('{"on_pressure": "block"}')
        rig.eager(["a"], rows=8, layers=1, width=4096)
        (gone,) = missing(rig.records())
        assert "is more than the 0 MiB of memory" in gone["reason"]

    def test_the_account_is_written_when_the_capture_ends_too(self, tmp_path):
        rig = Rig(tmp_path, 4, memory=4 * KIB)
        rig.capture()
        rig.arm()
        rig.run(["a"])
        rig.records()
        go = Held(rig)
        for seed in range(30):
            rig.run(["a", "b"], seed=seed)
        rig.disarm()
        rig.run(["a"])
        go.set()
        assert sum(gone["passes"] for gone in missing(rig.records())) > 0


class TestBlock:
    def test_the_server_waits_and_nothing_is_lost(self, tmp_path):
        rig = Rig(tmp_path, 4, memory=4 * KIB)
        rig.capture()
        rig.arm('{"on_pressure": "block"}')
        rig.run(["a"])
        rig.records()
        go = Held(rig)
        threading.Timer(0.3, go.set).start()
        expected = [rig.run(["a", "b"], seed=seed)[1] for seed in range(200)]
        assert go.free
        records = rig.records()
        layers = tensors(records, "layer/003")[1:]
        assert len(layers) == 200
        assert all(torch.equal(bits(layer), want) for layer, want in zip(layers, expected, strict=True))
        assert not missing(records)

    def test_a_writer_that_has_stopped_does_not_hold_the_server(self, tmp_path):
        rig = Rig(tmp_path, 4, memory=4 * KIB, max_bytes=6 * KIB)
        rig.capture()
        rig.arm('{"on_pressure": "block"}')
        for seed in range(200):
            rig.run(["a", "b"], seed=seed)
        gaps = [r for r in SpoolReader(tmp_path / "rank-0.spool") if r.kind == "gap"]
        assert "HSPROBE_MAX_BYTES" in gaps[-1].header["reason"]


class TestSample:
    def test_fewer_steps_are_recorded_until_the_writer_has_caught_up(self, tmp_path):
        rig = Rig(tmp_path, 4, memory=4 * KIB)
        rig.capture()
        rig.arm('{"on_pressure": "sample"}')
        rig.run(["a"])
        rig.records()
        go = Held(rig)
        for seed in range(60):
            rig.run(["a", "b"], seed=seed)
        stride = rig.recorder.stage.pressure.stride
        assert stride > 1
        go.set()
        records = rig.records()
        reasons = {gone["reason"]: gone["passes"] for gone in missing(records)}
        assert len(reasons) == 2
        assert any("until the writer had caught up" in reason for reason in reasons)
        kept = sum(r.kind == "pass" for r in records) - 1
        assert kept + sum(reasons.values()) == 60
        for seed in range(64 * 12):
            rig.run(["a"], seed=seed)
            if rig.recorder.stage.ring.used > KIB:
                rig.records()
        assert rig.recorder.stage.pressure.stride < stride


def test_a_ledger_counts_what_it_no_longer_lists():
    ledger = Ledger()
    for number in range(0, 200, 2):
        ledger.add("why", number)
    (one,) = ledger.take()
    assert (one.passes, len(one.ranges)) == (100, RANGES_NAMED)
    assert ledger.take() == []


def test_policies_and_sampling_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="drop, block, sample"):
        Pressure("wait")
    with pytest.raises(ValueError, match="on_pressure"):
        from_environment({"HSPROBE_ON_PRESSURE": "wait"})
    with pytest.raises(ValueError, match="count from 1"):
        Sampling(every=0)


@pytest.mark.parametrize(
    "said", ["[1]", "{", '{"every": 0}', '{"every": true}', '{"on_pressure": "x"}', '{"requests": 3}']
)
def test_what_a_capture_asks_for_is_checked(said):
    with pytest.raises(ValueError, match=r"."):
        Sampling().changed(said)


def test_a_capture_may_ask_for_what_a_later_release_knows():
    asked = Sampling().changed('{"every": 4, "rows": 2, "colour": "blue"}')
    assert asked == replace(Sampling(), every=4, rows=2)
    assert Sampling(every=3).changed("") == Sampling(every=3)


def test_a_request_that_is_not_understood_is_a_gap_and_the_capture_goes_on(tmp_path):
    rig = Rig(tmp_path, 4)
    rig.capture()
    rig.arm('{"every": "often"}')
    rig.run(["a"])
    records = rig.records()
    assert any("not understood" in r.header["reason"] for r in records if r.kind == "gap")
    assert any(r.kind == "pass" for r in records)


def test_only_the_last_rows_of_a_prompt_are_recorded(tmp_path):
    rig = Rig(tmp_path, 16)
    rig.arm('{"rows": 3}')
    computed = rig.eager(["a", "b"], rows=16)
    records = rig.records()
    (one,) = (r for r in records if r.kind == "pass")
    assert (one.header["n_rows"], one.header["req_rows"]) == (6, [3, 3])
    for layer, state in zip((r for r in records if r.kind == "tensor"), computed, strict=True):
        assert torch.equal(bits(layer), state[[5, 6, 7, 13, 14, 15]])
        assert layer.header["rows"] is None
