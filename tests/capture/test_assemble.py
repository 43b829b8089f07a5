"""Spools written as a server would write them become a trace whose every row is labelled."""

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsprobe.capture.assemble import AssembleSummary, RequestTokens, assemble
from hsprobe.errors import HsprobeError
from hsprobe.trace.context import context_hashes, extend
from hsprobe.trace.reader import Rank, Trace
from hsprobe.trace.schema import Phase, RowStatus
from hsprobe.trace.spool import SpoolReader, SpoolWriter

PLAIN, ACCEPTED, REJECTED, UNKNOWN, PADDING = RowStatus
WIDTH = 4


class Server:
    """Plays one process of a server. Row r of the tensor of a pass holds [pass, r, token, position]."""

    def __init__(self, path: Path, rank: int = 0, **hello: Any) -> None:
        self.path = path
        self.spool = SpoolWriter(path)
        self.count = itertools.count()
        self.spool.append("hello", {"rank": rank, "tp": rank, "pp": 0, "dp": 0, "attn_tp": rank, **hello})

    def request(self, rid: str, prompt: Sequence[int]) -> None:
        self.spool.append("request", {"rid": rid, "origin_ids": list(prompt)})

    def run(
        self,
        phase: str,
        rows: Mapping[str, tuple[int | Sequence[int], Sequence[int]]],
        *,
        model: str = "target",
        padding: int = 0,
        tensor: str | None = "layer/002",
    ) -> int:
        """A pass; `rows` gives each request's first position (or all its positions) and token ids."""
        number = next(self.count)
        tokens: list[int] = []
        positions: list[int] = []
        for where, ids in rows.values():
            tokens += ids
            positions += range(where, where + len(ids)) if isinstance(where, int) else where
        tokens += [999] * padding
        positions += [0] * padding
        header = {
            "pass": number,
            "model": model,
            "phase": phase,
            "mode": "FULL",
            "rids": list(rows),
            "req_rows": [len(ids) for _, ids in rows.values()],
            "n_rows": len(tokens),
            "time": 1000.0 + number,
        }
        self.spool.append("pass", header, np.array([tokens, positions], "<i8").tobytes())
        if tensor:
            data = np.array([[number, r, *row] for r, row in enumerate(zip(tokens, positions, strict=True))])
            self.tensor(number, data.astype(np.float32), name=tensor)
        return number

    def tensor(self, number: int, data: np.ndarray[Any, Any], **header: Any) -> None:
        whole = {
            "pass": number,
            "name": "layer/002",
            "site": "layer",
            "depth": 2,
            "depths": None,
            "chunks": None,
            "dtype": "float32",
            "shape": list(data.shape),
            "rows": None,
        }
        self.spool.append("tensor", whole | header, data.tobytes())

    def stop(self) -> Path:
        self.spool.append("idle", {})
        self.spool.close()
        return self.path


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path / "rank0.spool")


def capture(
    *servers: Server, requests: Mapping[str, RequestTokens] | None = None
) -> tuple[Trace, AssembleSummary]:
    out = servers[0].path.with_name("infer.h5")
    spools = [server.stop() for server in servers]
    summary = assemble(spools, out, provenance={"producer": "test"}, requests=requests)
    return Trace.open(out), summary


def known(prompt: Sequence[int] | None, output: Sequence[int]) -> RequestTokens:
    return RequestTokens(prompt, output)


def rows_of(rank: Rank, number: int) -> dict[str, list[int]]:
    """The labels of one pass."""
    index = rank.passes["id"].tolist().index(number)
    mask = rank.rows["pass"] == index
    return {name: column[mask].tolist() for name, column in rank.rows.items()}


def assert_tensors_lie_on_their_rows(rank: Rank) -> None:
    """Every row of every tensor that `Server.run` wrote carries its own token and position."""
    for tensor in rank.tensors.values():
        values = tensor.read()
        at = tensor.row_index
        assert values[:, 0].tolist() == rank.passes["id"][rank.rows["pass"][at]].tolist()
        assert values[:, 2].tolist() == rank.rows["token"][at].tolist()
        assert values[:, 3].tolist() == rank.rows["position"][at].tolist()


def test_two_requests_in_one_prefill_keep_their_own_contexts(server: Server) -> None:
    a, b = [5, 6, 7], [5, 9]
    server.request("a", a)
    server.request("b", b)
    number = server.run("prefill", {"a": (0, a), "b": (0, b)})
    trace, summary = capture(server, requests={"a": known(a, [1]), "b": known(b, [2])})
    rows = rows_of(trace.ranks[0], number)
    assert rows["context"] == context_hashes(a) + context_hashes(b)
    assert rows["request"] == [0, 0, 0, 1, 1]
    assert rows["status"] == [PLAIN] * 5
    assert rows["context"][0] == rows["context"][3]
    assert_tensors_lie_on_their_rows(trace.ranks[0])
    assert trace.requests.ids == ["a", "b"]
    assert trace.requests.tokens(1).tolist() == [5, 9, 2]
    assert trace.requests.prompt_len.tolist() == [3, 2]
    assert (summary.state, summary.rows, summary.passes, summary.ranks) == ("complete", 5, 1, 1)


def test_decode_rows_extend_the_context_of_the_prompt(server: Server) -> None:
    server.request("a", [5, 6])
    server.request("b", [7])
    server.run("prefill", {"a": (0, [5, 6]), "b": (0, [7])})
    first = server.run("decode", {"b": (1, [30]), "a": (2, [20])})
    second = server.run("decode", {"b": (2, [31]), "a": (3, [21])})
    trace, _ = capture(server)
    a, b = context_hashes([5, 6, 20, 21]), context_hashes([7, 30, 31])
    assert rows_of(trace.ranks[0], first)["context"] == [b[1], a[2]]
    assert rows_of(trace.ranks[0], second)["context"] == [b[2], a[3]]
    assert trace.requests.tokens(0).tolist() == [5, 6, 20, 21]
    assert trace.requests.prompt_len.tolist() == [2, 1]


@pytest.mark.parametrize("announced", [True, False], ids=["prompt announced", "prompt seen in passes only"])
def test_chunked_prefill_goes_on_where_the_chunk_before_ended(server: Server, announced: bool) -> None:
    prompt = list(range(40, 50))
    if announced:
        server.request("a", prompt)
    server.run("prefill", {"a": (0, prompt[:4])})
    middle = server.run("prefill", {"a": (4, prompt[4:7]), "b": (0, [1])})
    last = server.run("prefill", {"a": (7, prompt[7:])})
    server.run("decode", {"a": (10, [3]), "b": (1, [4])})
    trace, _ = capture(server)
    expected = context_hashes(prompt)
    assert rows_of(trace.ranks[0], middle)["context"] == [*expected[4:7], *context_hashes([1])]
    assert rows_of(trace.ranks[0], last)["context"] == expected[7:]
    assert trace.requests.prompt_len.tolist() == [10, 1]


def test_a_prefix_cache_hit_has_contexts_from_the_announced_prompt(server: Server) -> None:
    prompt = [1, 2, 3, 4, 5]
    server.request("a", prompt)
    number = server.run("prefill", {"a": (3, prompt[3:])})
    trace, summary = capture(server)
    assert rows_of(trace.ranks[0], number)["context"] == context_hashes(prompt)[3:]
    assert summary.rows == 2


def test_a_prefix_cache_hit_of_an_unknown_prompt_has_no_context(server: Server) -> None:
    number = server.run("prefill", {"a": (3, [4, 5])})
    verify = server.run("verify", {"a": (5, [6, 7])})
    trace, _ = capture(server)
    assert rows_of(trace.ranks[0], number)["context"] == [0, 0]
    assert rows_of(trace.ranks[0], verify)["context"] == [0, 0]
    assert rows_of(trace.ranks[0], verify)["status"] == [UNKNOWN, UNKNOWN]


def test_a_prefix_cache_hit_is_filled_from_what_the_client_sent(server: Server) -> None:
    number = server.run("prefill", {"a": (3, [4, 5])})
    trace, _ = capture(server, requests={"a": known([1, 2, 3, 4, 5], [6])})
    assert rows_of(trace.ranks[0], number)["context"] == context_hashes([1, 2, 3, 4, 5])[3:]


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
@pytest.mark.parametrize("client", [True, False], ids=["client knows", "from the passes"])
def test_verify_rows_are_accepted_as_far_as_they_equal_the_final_ids(
    server: Server, accepted: int, client: bool
) -> None:
    prompt, bonus = [1, 2], 10
    final = [*prompt, bonus, 11, 12, 13, 14, 15, 16]
    drafted = [token if k < accepted else 77 + k for k, token in enumerate([11, 12, 13])]
    server.request("a", prompt)
    server.run("prefill", {"a": (0, prompt)})
    first = server.run("verify", {"a": (2, [bonus, *drafted])})
    at = 2 + 1 + accepted
    server.run("verify", {"a": (at, [final[at], 90, 91, 92])})
    trace, _ = capture(server, requests={"a": known(prompt, final[2:])} if client else None)
    rows = rows_of(trace.ranks[0], first)
    assert rows["status"] == [ACCEPTED] * (1 + accepted) + [REJECTED] * (3 - accepted)
    assert rows["context"] == extend(context_hashes(prompt)[-1], [bonus, *drafted])
    assert_tensors_lie_on_their_rows(trace.ranks[0])


def test_a_request_that_ends_inside_a_verified_block_leaves_rows_of_unknown_fate(server: Server) -> None:
    server.request("a", [1, 2])
    server.run("prefill", {"a": (0, [1, 2])})
    number = server.run("verify", {"a": (2, [10, 11, 12, 13])})
    trace, _ = capture(server, requests={"a": known([1, 2], [10, 11])})
    rows = rows_of(trace.ranks[0], number)
    assert rows["status"] == [ACCEPTED, ACCEPTED, UNKNOWN, UNKNOWN]
    assert rows["context"] == context_hashes([1, 2, 10, 11, 12, 13])[2:]
    assert trace.requests.tokens(0).tolist() == [1, 2, 10, 11]


def test_a_pass_after_the_end_of_a_request_keeps_contexts_but_no_fate(server: Server) -> None:
    """An overlapping scheduler runs one more pass before it knows that a request is over."""
    server.request("a", [1])
    server.run("prefill", {"a": (0, [1])})
    server.run("verify", {"a": (1, [10, 11, 12])})
    extra = server.run("verify", {"a": (4, [13, 14, 15])})
    trace, _ = capture(server, requests={"a": known([1], [10, 11])})
    rows = rows_of(trace.ranks[0], extra)
    assert rows["status"] == [UNKNOWN] * 3
    assert rows["context"] == context_hashes([1, 10, 11, 12, 13, 14, 15])[4:]


def test_a_draft_tree_has_only_its_root_labelled(server: Server) -> None:
    server.request("a", [1])
    server.run("prefill", {"a": (0, [1])})
    number = server.run("verify", {"a": ([1, 2, 2, 3], [10, 11, 12, 13])})
    trace, _ = capture(server, requests={"a": known([1], [10, 11, 13])})
    rows = rows_of(trace.ranks[0], number)
    assert rows["status"] == [ACCEPTED, UNKNOWN, UNKNOWN, UNKNOWN]
    assert rows["context"] == [context_hashes([1, 10])[1], 0, 0, 0]


def test_draft_rows_take_the_context_of_the_target_position_they_continue(server: Server) -> None:
    prompt, final = [1, 2, 3], [1, 2, 3, 10, 11, 12, 13]
    server.request("a", prompt)
    server.run("prefill", {"a": (0, prompt)})
    prefill = server.run("prefill", {"a": (0, [2, 3, 10])}, model="draft", tensor="draft.input")
    decode = server.run("draft_decode", {"a": (3, [11])}, model="draft", tensor="draft.recycled")
    verify = server.run("verify", {"a": (3, [10, 11, 55])})
    grown = server.run("draft_extend", {"a": (3, [11, 12, 60])}, model="draft", tensor="draft.input")
    server.run("verify", {"a": (5, [12, 13, 14])})
    trace, _ = capture(server, requests={"a": known(prompt, final[3:])})
    rank = trace.ranks[0]
    assert rows_of(rank, prefill)["context"] == context_hashes(prompt)
    assert rows_of(rank, prefill)["status"] == [PLAIN] * 3
    assert rows_of(rank, decode)["context"] == [0]
    assert rows_of(rank, decode)["status"] == [UNKNOWN]
    assert rows_of(rank, grown)["context"] == rows_of(rank, verify)["context"]
    assert rows_of(rank, grown)["status"] == [ACCEPTED, ACCEPTED, REJECTED]
    assert rank.passes["phase"].tolist()[3:5] == [Phase.VERIFY, Phase.DRAFT_EXTEND]
    assert rank.passes["model"].tolist() == [0, 1, 1, 0, 1, 0]
    assert_tensors_lie_on_their_rows(rank)


def test_draft_extend_of_the_accepted_rows_only_matches_the_front_of_the_block(server: Server) -> None:
    server.request("a", [1])
    server.run("prefill", {"a": (0, [1])})
    verify = server.run("verify", {"a": (1, [10, 11, 55])})
    grown = server.run("draft_extend", {"a": (1, [11, 12])}, model="draft")
    trace, _ = capture(server, requests={"a": known([1], [10, 11, 12])})
    assert rows_of(trace.ranks[0], grown)["context"] == rows_of(trace.ranks[0], verify)["context"][:2]


def test_draft_extend_without_its_verify_pass_is_of_unknown_fate(server: Server) -> None:
    server.request("a", [1, 2])
    number = server.run("draft_extend", {"a": (1, [11, 12])}, model="draft")
    trace, _ = capture(server)
    rows = rows_of(trace.ranks[0], number)
    assert (rows["context"], rows["status"]) == ([0, 0], [UNKNOWN, UNKNOWN])


def test_padding_rows_are_marked_and_belong_to_nobody(server: Server) -> None:
    server.request("a", [1])
    number = server.run("prefill", {"a": (0, [1])}, padding=3)
    trace, _ = capture(server)
    rows = rows_of(trace.ranks[0], number)
    assert rows["status"] == [PLAIN, PADDING, PADDING, PADDING]
    assert rows["request"] == [0, -1, -1, -1]
    assert rows["context"][1:] == [0, 0, 0]
    assert trace.ranks[0].passes["n_rows"].tolist() == [4]


def test_last_and_listed_rows_land_on_the_rows_they_name(server: Server) -> None:
    number = server.run("prefill", {"a": (0, [1, 2, 3]), "b": (0, [4, 5])}, padding=2, tensor=None)
    server.tensor(number, np.array([[3.0], [5.0]], np.float32), name="draft.logits", rows="last", depth=None)
    server.tensor(number, np.array([[2.0], [1.0]], np.float32), name="draft.fc", rows=[1, 0], depth=None)
    trace, _ = capture(server)
    rank = trace.ranks[0]
    for name in ("draft.logits", "draft.fc"):
        tensor = rank.tensors[name]
        assert tensor.read()[:, 0].tolist() == rank.rows["token"][tensor.row_index].tolist()
        assert tensor.depth is None


def test_health_checks_leave_no_trace_alone_or_beside_others(server: Server) -> None:
    server.run("prefill", {"HEALTH_CHECK_1": (0, [8, 8])})
    number = server.run("prefill", {"HEALTH_CHECK_2": (0, [8, 8]), "a": (0, [1, 2])}, padding=1)
    trace, summary = capture(server)
    rank = trace.ranks[0]
    assert trace.requests.ids == ["a"]
    assert rank.passes["id"].tolist() == [number]
    assert rank.passes["n_rows"].tolist() == [3]
    assert rows_of(rank, number)["token"] == [1, 2, 999]
    assert_tensors_lie_on_their_rows(rank)
    assert summary.dropped_rows == 4
    assert summary.rows == 3
    assert trace.gaps == []


def test_a_retracted_request_that_is_prefilled_again_keeps_its_ids(server: Server) -> None:
    server.request("a", [1, 2])
    server.run("prefill", {"a": (0, [1, 2])})
    server.run("decode", {"a": (2, [3])})
    again = server.run("prefill", {"a": (0, [1, 2, 3])})
    server.run("decode", {"a": (3, [4])})
    trace, _ = capture(server)
    assert rows_of(trace.ranks[0], again)["context"] == context_hashes([1, 2, 3])
    assert trace.requests.tokens(0).tolist() == [1, 2, 3, 4]
    assert trace.requests.prompt_len.tolist() == [2]


def test_a_text_prompt_is_learnt_from_the_server(server: Server) -> None:
    server.request("a", [1, 2, 3])
    server.run("prefill", {"a": (0, [1, 2, 3])})
    trace, _ = capture(server, requests={"a": known(None, [7, 8])})
    assert trace.requests.tokens(0).tolist() == [1, 2, 3, 7, 8]
    assert trace.requests.prompt_len.tolist() == [3]


def test_a_client_that_contradicts_the_server_is_not_believed(server: Server) -> None:
    server.request("a", [1, 2])
    number = server.run("prefill", {"a": (0, [1, 2])})
    trace, _ = capture(server, requests={"a": known([1, 9], [7])})
    assert rows_of(trace.ranks[0], number)["context"] == context_hashes([1, 2])
    assert "differ from those the server ran from position 1" in trace.gaps[0]["reason"]


def test_an_id_used_for_two_requests_gives_no_context_rather_than_a_wrong_one(server: Server) -> None:
    server.run("prefill", {"a": (0, [1, 2])})
    second = server.run("prefill", {"a": (0, [3, 4])})
    later = server.run("decode", {"a": (2, [5])})
    trace, _ = capture(server)
    assert rows_of(trace.ranks[0], second)["context"] == [0, 0]
    assert rows_of(trace.ranks[0], later)["context"] == [0]
    assert "contradict" in trace.gaps[0]["reason"]


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
