"""Where each row of the draft stands in its request, and which keys it sees."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "capture"))
from played import Server, capture, known

from hsprobe.draft.timeline import NONE, Timeline, timeline

A, OUT_A = [5, 6, 7, 8], [20, 21, 22, 23, 24]
B, OUT_B = [5, 6, 7, 9], [30, 31]


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path / "rank0.spool")


def played(server: Server, *, prefix_b: int = 0) -> Timeline:
    """Request a drafts two tokens twice, of which one and none are accepted; then b, behind a prefix hit."""
    run, draft = server.run, {"model": "draft", "tensor": None}
    server.request("a", A)
    run("prefill", {"a": (0, A)})
    run("prefill", {"a": (0, [6, 7, 8, 20])}, **draft)
    run("draft_decode", {"a": (4, [21])}, **draft)
    run("verify", {"a": (4, [20, 21, 99])})
    run("draft_extend", {"a": (4, [21, 22, 50])}, **draft)
    run("draft_decode", {"a": (6, [77])}, **draft)
    run("verify", {"a": (6, [22, 77, 78])})
    run("draft_extend", {"a": (6, [23, 51, 52])}, **draft)
    run("verify", {"a": (7, [23, 61, 62])})
    server.request("b", B)
    run("prefill", {"b": (prefix_b, B[prefix_b:])})
    run("prefill", {"b": (prefix_b, [*B[prefix_b + 1 :], 30])}, **draft)
    trace, _ = capture(server, requests={"a": known(A, OUT_A), "b": known(B, OUT_B)})
    return timeline(trace, trace.ranks[0])


def test_steps_take_the_slots_after_the_row_last_accepted(server: Server) -> None:
    rows = played(server)
    steps = np.flatnonzero(rows.step > 0)
    assert rows.slot[steps].tolist() == [4, 6]
    # After the prompt the chain goes on from its last row, after the verified block from its second.
    assert rows.after[steps].tolist() == [3, 6]
    assert rows.slot[rows.after[steps]].tolist() == [3, 5]


def test_rows_of_accepted_tokens_expect_the_token_that_follows(server: Server) -> None:
    rows = played(server)
    extend = np.flatnonzero((rows.step == 0) & (rows.request == 0))
    assert rows.expected[extend].tolist() == [6, 7, 8, 20, 21, 22, NONE, 23, NONE, NONE]
    assert rows.token[extend][rows.committed[extend]].tolist() == [6, 7, 8, 20, 21, 22, 23]


def test_proposals_are_known_by_the_row_that_made_them(server: Server) -> None:
    assert played(server).verified == {3: 21, 4: 99, 6: 77, 8: 78, 9: 61}


def test_a_row_sees_the_last_writer_of_every_slot_up_to_its_own(server: Server) -> None:
    rows = played(server)
    seen = rows.seen_by(range(len(rows)))
    step, rejected, after = 4, 7, 8
    assert seen[step].tolist() == [0, 1, 2, 3, 4]
    assert seen[rejected].tolist() == [0, 1, 2, 3, 5, 6, 7]
    # The second chain overwrites the rejected row's slot.
    assert seen[after].tolist() == [0, 1, 2, 3, 5, 6, 8]


def test_cached_slots_are_rows_of_the_same_tokens_up_to_the_next(server: Server) -> None:
    rows = played(server, prefix_b=3)
    last = len(rows) - 1
    assert rows.cached[last] == 3
    # Slot 2 of request b is followed by 9, that of request a was fed 8: no recorded row has its key.
    assert rows.seen_by([last])[last].tolist() == [0, 1, NONE, last]
    assert rows.twins(last, 2) == [2]


def test_a_hit_that_ends_before_the_tokens_part_is_known_whole(server: Server) -> None:
    rows = played(server, prefix_b=2)
    last = len(rows) - 1
    assert rows.seen_by([last])[last].tolist() == [0, 1, last - 1, last]


def test_slots_are_the_targets_places_whatever_positions_the_draft_was_given(server: Server) -> None:
    server.request("a", A)
    server.run("prefill", {"a": (0, A)})
    server.run("prefill", {"a": (7, [6, 7, 8, 20])}, model="draft", tensor=None)
    trace, _ = capture(server, requests={"a": known(A, OUT_A)})
    rows = timeline(trace, trace.ranks[0])
    assert rows.slot.tolist() == [0, 1, 2, 3]
    assert rows.position.tolist() == [7, 8, 9, 10]


def test_a_trace_without_a_draft_has_an_empty_timeline(server: Server) -> None:
    server.request("a", A)
    server.run("prefill", {"a": (0, A)})
    trace, _ = capture(server, requests={"a": known(A, OUT_A)})
    assert len(timeline(trace, trace.ranks[0])) == 0
