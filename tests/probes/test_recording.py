"""The recorder with real tensors and a real spool, without a server around it."""

from types import SimpleNamespace

import pytest
import torch

from hsprobe.probes.sglang.labels import read_pass
from hsprobe.probes.sglang.placing import NotRecordable
from hsprobe.probes.sglang.spooling import Copy, Spooler
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


TARGET, DRAFT = SimpleNamespace(is_draft_worker=False), SimpleNamespace(is_draft_worker=True)


def test_rows_belong_to_requests_by_phase():
    prefill = read_pass(1, 1, TARGET, batch_of("EXTEND", [3, 5], extend_seq_lens_cpu=[3, 5]))
    assert (prefill.phase, prefill.req_rows, prefill.n_rows) == ("prefill", [3, 5], 8)
    verify = read_pass(2, 2, TARGET, batch_of("TARGET_VERIFY", [4, 4]))
    assert (verify.phase, verify.req_rows) == ("verify", [4, 4])
    assert read_pass(3, 3, TARGET, batch_of("DECODE", [1, 1])).phase == "decode"
    assert read_pass(4, 4, DRAFT, batch_of("DECODE", [1, 1])).phase == "draft_decode"
    assert read_pass(5, 5, DRAFT, batch_of("DRAFT_EXTEND_V2", [4, 4])).phase == "draft_extend"


def test_batches_without_rows_are_left_out_and_unknown_ones_refused():
    assert read_pass(1, 1, TARGET, batch_of("IDLE", [])) is None
    with pytest.raises(NotRecordable, match="DLLM_EXTEND"):
        read_pass(1, 1, TARGET, batch_of("DLLM_EXTEND", [2]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_a_copy_keeps_the_bits_that_were_there_when_it_was_made(dtype):
    source = torch.randn(5, 6).to(dtype)[:, ::2]
    expected = source.clone().contiguous().view(torch.uint8).numpy().tobytes()
    copy = Copy(source)
    source.zero_()
    assert bytes(copy.bytes()) == expected
    assert copy.shape == [5, 3]
    assert copy.dtype == str(dtype).removeprefix("torch.")


def wait_for(spool, kind, seconds=5.0):
    import time

    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        records = list(SpoolReader(spool)) if spool.exists() else []
        if records and records[-1].kind == kind:
            return records
        time.sleep(0.02)
    raise AssertionError(f"no {kind} record at the end of {spool}")


def test_records_come_in_order_and_the_spool_says_when_its_queue_is_empty(tmp_path):
    spooler = Spooler(tmp_path / "rank.spool", max_bytes=1 << 20)
    tensors = [torch.randn(4, 3) for _ in range(10)]
    for i, tensor in enumerate(tensors):
        spooler.put("tensor", {"pass": i}, (Copy(tensor),))
    records = wait_for(spooler.path, "idle")
    assert [r.header.get("pass") for r in records[:-1]] == list(range(10))
    for record, tensor in zip(records, tensors, strict=False):
        assert bytes(record.payload) == tensor.numpy().tobytes()


def test_a_full_spool_stops_recording_and_leaves_a_gap(tmp_path):
    spooler = Spooler(tmp_path / "rank.spool", max_bytes=100)
    for i in range(4):
        spooler.put("tensor", {"pass": i}, (Copy(torch.zeros(10)),))
    records = wait_for(spooler.path, "gap")
    assert [r.header["pass"] for r in records] == [0, 1, 2]
    assert "limit of 100 bytes" in records[-1].header["reason"]
    spooler.put("tensor", {"pass": 9}, (Copy(torch.zeros(10)),))
    assert len(list(SpoolReader(spooler.path))) == 3
