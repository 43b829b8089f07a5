"""Every row of a capture says whose token it is, in which context, and whether it was accepted."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from played import Server, assert_tensors_lie_on_their_rows, capture, known, rows_of

from hsprobe.trace.context import context_hashes, extend
from hsprobe.trace.schema import Phase, RowStatus

PLAIN, ACCEPTED, REJECTED, UNKNOWN, PADDING = RowStatus


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path / "rank0.spool")


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


@pytest.mark.parametrize("chunks", [[(3, [4, 5])], [(0, [1, 2]), (3, [4, 5])]], ids=["cached", "lost"])
def test_answers_to_a_text_prompt_of_unknown_length_are_not_placed(
    server: Server, chunks: list[tuple[int, Sequence[int]]]
) -> None:
    for start, tokens in chunks:
        server.run("prefill", {"a": (start, tokens)})
    number = server.run("decode", {"a": (5, [6])})
    trace, _ = capture(server, requests={"a": known(None, [6, 7])})
    assert rows_of(trace.ranks[0], number)["context"] == [0]
    assert 6 not in trace.requests.tokens(0)
