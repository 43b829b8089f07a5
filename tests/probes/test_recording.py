"""The recorder with real tensors and a real spool, without a server around it."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hsprobe.probes.sglang.labels import Labeller, read_pass
from hsprobe.probes.sglang.placing import NotRecordable
from hsprobe.probes.sglang.pressure import Pressure
from hsprobe.probes.sglang.sampling import Sampling
from hsprobe.probes.sglang.spooling import Spooler
from hsprobe.probes.sglang.staging import Stage
from hsprobe.trace.spool import SpoolReader


def batch_of(mode: str, rows: list[int], **more):
    total = sum(rows)
    return SimpleNamespace(
        forward_mode=SimpleNamespace(name=mode),
        rids=[f"r{i}" for i in range(len(rows))],
        input_ids=torch.arange(total),
        positions=torch.arange(total) + 7,
        capture_hidden_mode=SimpleNamespace(name="FULL"),
        **more,
    )


EVERYTHING = Sampling()
TARGET, DRAFT = SimpleNamespace(is_draft_worker=False), SimpleNamespace(is_draft_worker=True)


def test_rows_belong_to_requests_by_phase():
    prefill = read_pass(1, 1, TARGET, batch_of("EXTEND", [3, 5], extend_seq_lens_cpu=[3, 5])).form
    assert (prefill.phase, prefill.req_rows, prefill.n_rows) == ("prefill", [3, 5], 8)
    verify = read_pass(2, 2, TARGET, batch_of("TARGET_VERIFY", [4, 4])).form
    assert (verify.phase, verify.req_rows) == ("verify", [4, 4])
    assert read_pass(3, 3, TARGET, batch_of("DECODE", [1, 1])).phase == "decode"
    assert read_pass(4, 4, DRAFT, batch_of("DECODE", [1, 1])).phase == "draft_decode"
    assert read_pass(5, 5, DRAFT, batch_of("DRAFT_EXTEND_V2", [4, 4])).phase == "draft_extend"


def batch_without_ids(mode: str, rows: list[int], **more):
    """As SGLang 0.5.9 has it: of how many requests, but not of which."""
    batch = batch_of(mode, rows, batch_size=len(rows), **more)
    del batch.rids
    return batch


def scheduled(*finished: bool):
    """The requests of the scheduler's batch."""
    return [SimpleNamespace(rid=f"q{i}", finished=lambda over=over: over) for i, over in enumerate(finished)]


def test_where_a_batch_does_not_name_its_requests_the_scheduler_does():
    labeller = Labeller()

    def read(model, batch, requests):
        return labeller.read(1, 1, model, batch, EVERYTHING, requests).form

    both = scheduled(False, False)
    prefill = read(TARGET, batch_without_ids("EXTEND", [3, 5], extend_seq_lens_cpu=[3, 5]), both)
    assert (prefill.rids, prefill.req_rows) == (["q0", "q1"], [3, 5])
    assert read(TARGET, batch_without_ids("TARGET_VERIFY", [4, 4]), both).rids == ["q0", "q1"]
    # Of equally many rows, then other ones of each.
    for rows in ([1, 3], [2, 2]):
        extend = read(DRAFT, batch_without_ids("DRAFT_EXTEND", rows, extend_seq_lens_cpu=rows), both)
        assert (extend.phase, extend.req_rows, extend.rids) == ("draft_extend", rows, ["q0", "q1"])
    late = batch_without_ids("DRAFT_EXTEND", [2], extend_seq_lens_cpu=[2])
    assert read(DRAFT, late, scheduled(True, False)).rids == ["q1"]


def test_a_pass_over_other_requests_than_the_schedulers_is_refused():
    with pytest.raises(NotRecordable, match="over 1 requests, where the scheduler's batch has 2"):
        read_pass(1, 1, TARGET, batch_without_ids("DECODE", [1]), requests=scheduled(False, False))
    assert read_pass(1, 1, TARGET, batch_without_ids("IDLE", []), requests=scheduled(False)) is None


def test_batches_without_rows_are_left_out_and_unknown_ones_refused():
    assert read_pass(1, 1, TARGET, batch_of("IDLE", [])) is None
    with pytest.raises(NotRecordable, match="DLLM_EXTEND"):
        read_pass(1, 1, TARGET, batch_of("DLLM_EXTEND", [2]))


def test_the_steps_of_a_batch_have_one_form_until_it_changes():
    labeller, verify = Labeller(), [4, 4]

    def read(number, rows, sampling=EVERYTHING):
        return labeller.read(number, number, TARGET, batch_of("TARGET_VERIFY", rows), sampling)

    first, second = read(1, verify), read(2, verify)
    assert first.form is second.form
    assert (first.number, second.number) == (1, 2)
    assert read(3, [4]).form.rids == ["r0"]
    assert read(4, verify).form is not first.form
    labeller.forget()
    chosen = read(5, verify, Sampling(requests="r1")).form
    assert (chosen.header()["rids"], chosen.runs_of(None)) == (["r1"], [(4, 4), (4, 8)])


def spooler_at(path: Path, max_bytes: int = 1 << 20) -> Stage:
    return Stage(Spooler(path, max_bytes, 1 << 16), Pressure("drop"))


def wait_for(spool, kind, seconds=20.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        records = list(SpoolReader(spool)) if spool.exists() else []
        if records and records[-1].kind == kind:
            return records
        time.sleep(0.02)
    raise AssertionError(f"no {kind} record at the end of {spool}")


def put(stage: Stage, tensor: torch.Tensor, number: int) -> None:
    piece = stage.copy(tensor)
    assert piece is not None
    stage.add("tensor", {"pass": number}, (piece,))
    stage.flush()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_a_copy_keeps_the_bits_that_were_there_when_it_was_made(dtype, tmp_path):
    stage = spooler_at(tmp_path / "rank.spool")
    source = torch.randn(5, 6).to(dtype)[:, ::2]
    expected = source.clone().contiguous().view(torch.uint8).numpy().tobytes()
    put(stage, source, 1)
    source.zero_()
    assert bytes(wait_for(tmp_path / "rank.spool", "idle")[0].payload) == expected


def test_records_come_in_order_and_the_spool_says_when_its_queue_is_empty(tmp_path):
    stage = spooler_at(tmp_path / "rank.spool")
    tensors = [torch.randn(4, 3) for _ in range(10)]
    for i, tensor in enumerate(tensors):
        put(stage, tensor, i)
    records = wait_for(tmp_path / "rank.spool", "idle")
    assert [r.header.get("pass") for r in records[:-1]] == list(range(10))
    for record, tensor in zip(records, tensors, strict=False):
        assert bytes(record.payload) == tensor.numpy().tobytes()


def test_a_full_spool_stops_recording_and_leaves_a_gap(tmp_path):
    stage = spooler_at(tmp_path / "rank.spool", max_bytes=100)
    for i in range(4):
        put(stage, torch.zeros(10), i)
    records = wait_for(tmp_path / "rank.spool", "gap")
    assert [r.header["pass"] for r in records] == [0, 1, 2]
    assert "limit of 100 bytes" in records[-1].header["reason"]
    assert "limit of 100 bytes" in stage.spooler.stopped
    put(stage, torch.zeros(10), 9)
    time.sleep(0.3)
    assert len(list(SpoolReader(tmp_path / "rank.spool"))) == 3


def test_a_spool_that_cannot_be_written_stops_the_recording(tmp_path):
    stage = spooler_at(tmp_path / "no-such-folder" / "rank.spool")
    deadline = time.monotonic() + 20
    while stage.spooler.stopped is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert "cannot be written" in stage.spooler.stopped
    put(stage, torch.zeros(10), 1)
