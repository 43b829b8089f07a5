"""Spools of one process or several, whole or broken, become one trace."""

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from played import WIDTH, Server, assert_tensors_lie_on_their_rows, capture, rows_of

from hsprobe.capture.assemble import assemble
from hsprobe.errors import HsprobeError
from hsprobe.trace.reader import Trace
from hsprobe.trace.schema import RowStatus
from hsprobe.trace.spool import SpoolReader

PLAIN, ACCEPTED, REJECTED, UNKNOWN, PADDING = RowStatus


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path / "rank0.spool")


def test_two_ranks_are_kept_apart_and_agree_on_contexts(tmp_path: Path) -> None:
    ranks = [Server(tmp_path / f"rank{i}.spool", rank=i) for i in (1, 0)]
    for one in ranks:
        one.request("a", [1, 2])
        one.run("prefill", {"a": (0, [1, 2])})
    trace, summary = capture(*ranks)
    assert [rank.index for rank in trace.ranks] == [0, 1]
    assert [rank.coords["tp"] for rank in trace.ranks] == [0, 1]
    assert trace.ranks[0].rows["context"].tolist() == trace.ranks[1].rows["context"].tolist()
    assert trace.requests.ids == ["a"]
    assert (summary.ranks, summary.rows, summary.requests) == (2, 4, 1)


def test_two_processes_of_the_same_rank_get_numbers_of_their_own(tmp_path: Path) -> None:
    ranks = [Server(tmp_path / f"{name}.spool", rank=0) for name in "xy"]
    for one in ranks:
        one.run("prefill", {"a": (0, [1, 2])})
    trace, _ = capture(*ranks)
    assert [rank.index for rank in trace.ranks] == [0, 1]


def test_a_process_that_began_anew_in_its_spool_is_another_rank(server: Server) -> None:
    server.run("prefill", {"a": (0, [1, 2])})
    server.spool.append("hello", {"rank": 0})
    server.count = itertools.count()
    server.run("prefill", {"b": (0, [3])})
    trace, summary = capture(server)
    assert [rank.rows["token"].tolist() for rank in trace.ranks] == [[1, 2], [3]]
    assert [len(rank.tensors["layer/002"]) for rank in trace.ranks] == [2, 1]
    assert summary.state == "recovered"


def test_a_pass_says_whether_it_was_replayed_from_a_graph(server: Server) -> None:
    server.run("prefill", {"a": (0, [1, 2])})
    server.run("decode", {"a": (2, [3])}, graph=True)
    server.run("decode", {"a": (3, [4])}, graph=False)
    server.run("decode", {"a": (4, [5])}, graph="yes")
    trace, _ = capture(server)
    assert trace.ranks[0].passes["graph"].tolist() == [0, 1, 0, 0]


def test_only_what_follows_the_start_offset_is_taken(server: Server) -> None:
    server.run("prefill", {"old": (0, [1, 2])})
    server.spool.append("idle", {})
    server.spool.flush()
    start = server.path.stat().st_size
    server.run("prefill", {"new": (0, [3])})
    path = server.stop()
    out = path.with_name("infer.h5")
    summary = assemble([path], out, provenance={}, start_offsets={path: start})
    with Trace.open(out) as trace:
        assert trace.requests.ids == ["new"]
        assert trace.ranks[0].rows["token"].tolist() == [3]
        assert_tensors_lie_on_their_rows(trace.ranks[0])
        assert trace.ranks[0].coords["tp"] == 0
    assert summary.state == "complete"


def test_a_process_that_stood_still_has_not_come_to_the_end(server: Server) -> None:
    server.run("prefill", {"a": (0, [1, 2])})
    server.spool.append("idle", {"running": 1})
    server.spool.close()
    out = server.path.with_name("infer.h5")
    assert assemble([server.path], out, provenance={}).state == "recovered"
    with Trace.open(out) as trace:
        (gap,) = trace.gaps
        assert "stood still" in gap["reason"]


def test_a_spool_torn_anywhere_gives_a_trace_of_what_came_before(server: Server, tmp_path: Path) -> None:
    server.request("a", [1, 2])
    server.run("prefill", {"a": (0, [1, 2])})
    server.run("verify", {"a": (2, [10, 11, 12])})
    server.run("verify", {"a": (4, [12, 13, 14])})
    whole = server.stop().read_bytes()
    ends = [record.end for record in SpoolReader(server.path)]
    torn, out = tmp_path / "torn.spool", tmp_path / "torn.h5"
    for length in [*range(0, len(whole), 23), *ends[:-1]]:
        torn.write_bytes(whole[:length])
        summary = assemble([torn], out, provenance={})
        with Trace.open(out) as trace:
            assert summary.rows == sum(len(rank.rows["pass"]) for rank in trace.ranks)
            assert (trace.state == "complete") == (length in {0, *ends[:2]})
            assert (torn in summary.torn) == (length not in {0, *ends})
            for rank in trace.ranks:
                assert_tensors_lie_on_their_rows(rank)
    # With all passes but no client, the ids are those that the passes confirm.
    torn.write_bytes(whole[: ends[-2]] + b"HSPF")
    assemble([torn], out, provenance={})
    with Trace.open(out) as trace:
        assert trace.requests.tokens(0).tolist() == [1, 2, 10, 11, 12]
        assert rows_of(trace.ranks[0], 1)["status"] == [ACCEPTED, ACCEPTED, ACCEPTED]
        assert rows_of(trace.ranks[0], 2)["status"] == [ACCEPTED, UNKNOWN, UNKNOWN]
        assert "breaks off" in trace.gaps[0]["reason"]


def test_a_server_killed_while_it_writes_leaves_every_flushed_pass(tmp_path: Path) -> None:
    path, out = tmp_path / "killed.spool", tmp_path / "killed.h5"
    program = """
import sys, numpy as np
from hsprobe.trace.spool import SpoolWriter
spool = SpoolWriter(sys.argv[1])
spool.append("hello", {"rank": 0})
for n in range(10**9):
    header = {"pass": n, "model": "target", "phase": "decode", "mode": "NULL", "rids": ["a"], "req_rows": [1]}
    spool.append("pass", header | {"n_rows": 1, "time": 0.0}, np.array([n % 97, n], "<i8").tobytes())
    tensor = {"pass": n, "name": "layer/001", "site": "layer", "depth": 1, "dtype": "float32", "rows": None}
    spool.append("tensor", tensor | {"shape": [1, 20000]}, np.full(20000, n, np.float32).tobytes())
    spool.flush()
    print(n, flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(200)]
        os.kill(process.pid, signal.SIGKILL)
        flushed = int((lines + process.stdout.readlines())[-1])
    summary = assemble([path], out, provenance={})
    assert summary.passes >= flushed + 1
    with Trace.open(out) as trace:
        assert trace.state == "recovered"
        tensor = trace.ranks[0].tensors["layer/001"]
        assert len(tensor) >= flushed + 1
        values = tensor.read(slice(0, flushed + 1))
        assert (values == np.arange(flushed + 1)[:, None]).all()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dtype": "complex64"}, "dtype complex64 is not known"),
        ({"shape": [1, WIDTH]}, "bytes for 1 x 4"),
        ({"shape": [2, WIDTH, 1]}, "too many values"),
        ({"rows": [0, 5]}, "a row lies outside"),
        ({"rows": [0, 1, 1]}, "2 rows for 3 rows"),
        ({"pass": 70}, "pass was not recorded"),
        ({"depth": 5}, "layer/002 changed"),
        ({"name": ""}, "cannot be the name"),
        ({"site": None}, "site"),
    ],
)
def test_a_tensor_that_fits_nothing_is_a_gap_and_the_rest_goes_on(
    server: Server, change: dict[str, Any], said: str
) -> None:
    number = server.run("prefill", {"a": (0, [1, 2])})
    server.tensor(number, np.zeros((2, WIDTH), np.float32), **change)
    server.run("decode", {"a": (2, [3])})
    trace, summary = capture(server)
    assert summary.tensor_rows == 3
    assert_tensors_lie_on_their_rows(trace.ranks[0])
    assert len(trace.gaps) == 1
    assert said in trace.gaps[0]["reason"]


def test_a_tensor_that_changes_width_keeps_its_first_width(server: Server) -> None:
    number = server.run("prefill", {"a": (0, [1, 2])})
    for _ in range(3):
        server.tensor(number, np.zeros((2, WIDTH + 1), np.float32))
    trace, _ = capture(server)
    assert trace.ranks[0].tensors["layer/002"].shape == (2, WIDTH)
    assert trace.gaps[0]["reason"].endswith("(3 times)")


def test_rows_beyond_the_pass_are_left_out_and_said(server: Server) -> None:
    number = server.run("prefill", {"a": (0, [1, 2])}, tensor=None)
    server.tensor(number, np.arange(12, dtype=np.float32).reshape(3, WIDTH))
    trace, _ = capture(server)
    assert trace.ranks[0].tensors["layer/002"].read()[:, 0].tolist() == [0, 4]
    assert "left out" in trace.gaps[0]["reason"]


def test_a_malformed_pass_is_a_gap(server: Server) -> None:
    server.spool.append("pass", {"pass": 5, "model": "target"}, b"")
    server.spool.append("pass", {"pass": "x"}, b"")
    server.run("prefill", {"a": (0, [1])})
    trace, summary = capture(server)
    assert summary.passes == 1
    assert all("malformed" in gap["reason"] for gap in trace.gaps)


def test_gaps_of_probes_come_through_once_each(server: Server) -> None:
    for number in (3, 4):
        server.spool.append("gap", {"pass": number, "site": "layer", "depth": 2, "reason": "disarmed"})
    trace, _ = capture(server)
    assert trace.gaps == [{"rank": 0, "site": "layer", "depth": 2, "pass": 3, "reason": "disarmed (2 times)"}]


def test_provenance_of_the_caller_lies_over_that_of_the_process(tmp_path: Path) -> None:
    told = {"producer": "sglang", "model": {"num_layers": 8, "path": "m"}}
    server = Server(tmp_path / "a.spool", provenance=told)
    path = server.stop()
    assemble([path], tmp_path / "o.h5", provenance={"model": {"path": "n"}, "accept_length": 2.5})
    with Trace.open(tmp_path / "o.h5") as trace:
        assert trace.provenance == {
            "producer": "sglang",
            "model": {"num_layers": 8, "path": "n"},
            "accept_length": 2.5,
        }


def test_bits_of_half_precision_come_through(server: Server) -> None:
    bits = np.array([[0x7FC1, 0xFF81, 0x0001, 0x8000], [0x3F80, 0x7F80, 0xFFFF, 0x1234]], np.uint16)
    number = server.run("prefill", {"a": (0, [1, 2])}, tensor=None)
    server.tensor(number, bits, name="aux", site="aux", dtype="bfloat16", depth=None, depths=[2, 4], chunks=2)
    trace, _ = capture(server)
    tensor = trace.ranks[0].tensors["aux"]
    assert (tensor.read_raw() == bits).all()
    assert (tensor.depths, tensor.chunks, tensor.dtype) == ([2, 4], 2, "bfloat16")
    assert (tensor.read_raw(chunk=1) == bits[:, 2:]).all()


def test_no_spool_at_all_is_one_clear_sentence(tmp_path: Path) -> None:
    with pytest.raises(HsprobeError, match="recorded nothing"):
        assemble([], tmp_path / "o.h5", provenance={})


def test_a_file_that_is_no_spool_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.spool"
    path.write_text("these are notes")
    with pytest.raises(HsprobeError, match="not a spool"):
        assemble([path], tmp_path / "o.h5", provenance={})
    assert not (tmp_path / "o.h5").exists()


def test_what_probes_showed_of_themselves_is_in_the_provenance_the_worst_of_the_ranks(tmp_path: Path) -> None:
    servers = [Server(tmp_path / f"{rank}.spool", rank) for rank in range(2)]
    for rank, server in enumerate(servers):
        for state, why in (("unproven", "no pass"), ("proven", "")):
            server.spool.append("proof", {"site": "layer", "state": state, "why": why})
        server.spool.append(
            "proof", {"site": "aux", "state": ("proven", "unproven")[rank], "why": "x" * rank}
        )
        server.run("prefill", {"a": (0, [1, 2])})
    trace, _ = capture(*servers)
    assert trace.provenance["self_test"] == {
        "layer": {"state": "proven"},
        "aux": {"state": "unproven", "why": "x", "ranks": [1]},
    }


def test_rows_of_a_probe_that_was_shown_to_misread_are_left_out(server: Server) -> None:
    server.run("prefill", {"a": (0, [1, 2])})
    number = server.run("prefill", {"a": (2, [3])}, tensor=None)
    server.tensor(number, np.zeros((1, WIDTH), np.float32), name="mid/001", site="mid", depth=1)
    why = {"site": "layer", "state": "disarmed", "why": "it misread"}
    server.spool.append("proof", {**why, "refuted": True})
    server.spool.append("proof", why)
    server.spool.append("gap", {"pass": None, "site": "layer", "depth": None, "reason": "it misread"})
    server.spool.append("proof", {"site": "mid"})
    trace, _ = capture(server)
    assert set(trace.ranks[0].tensors) == {"mid/001"}
    assert trace.provenance["self_test"] == {"layer": {"state": "disarmed", "why": "it misread"}}
    assert [gap["reason"] for gap in trace.gaps] == ["it misread", "a proof record is malformed: 'state'"]
