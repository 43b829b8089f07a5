"""Which rows of a capture are compared with each other."""

from pathlib import Path

import numpy as np

from hsprobe.compare.repeats import Repeats, Way, repeats
from hsprobe.compare.stack import Keys, stacks_of
from hsprobe.trace.reader import Trace
from hsprobe.trace.schema import Phase, RowStatus
from tests.synthetic import World, prompts, write_infer

PREFILL, DECODE, VERIFY = int(Phase.PREFILL), int(Phase.DECODE), int(Phase.VERIFY)


def _keys(rows: list[tuple[int, int, int]], **columns: list[int]) -> Keys:
    """Keys of rows given as (context, position, phase)."""
    context, position, phase = (np.array(values) for values in zip(*rows, strict=True))
    n = len(rows)
    return Keys(
        context=context.astype(np.uint64),
        position=position.astype(np.int64),
        token=np.array(columns.get("token", [1] * n)),
        request=np.zeros(n, np.int64),
        phase=phase.astype(np.uint8),
        status=np.array(columns.get("status", [int(RowStatus.PLAIN)] * n), np.uint8),
        model=np.zeros(n, np.uint8),
        graph=np.array(columns.get("graph", [0] * n), np.uint8),
        row=np.array(columns.get("row", list(range(n)))),
    )


def _pairs(found: Repeats) -> dict[tuple[Way, Way], list[tuple[int, int]]]:
    return {
        ways: list(zip(p.left.tolist(), p.right.tolist(), strict=True)) for ways, p in found.pairs.items()
    }


def test_a_context_computed_twice_is_compared_with_its_prefill_row() -> None:
    found = repeats(
        _keys([(7, 0, VERIFY), (8, 1, DECODE), (7, 0, PREFILL), (9, 2, PREFILL), (7, 0, PREFILL)])
    )
    assert _pairs(found) == {
        (Way(PREFILL), Way(PREFILL)): [(4, 2)],
        (Way(VERIFY), Way(PREFILL)): [(0, 2)],
    }
    assert (found.rows, found.contexts, found.repeated) == (5, 3, 1)


def test_an_eager_row_is_what_others_of_its_phase_are_compared_with() -> None:
    found = repeats(
        _keys([(7, 0, VERIFY), (7, 0, VERIFY), (8, 1, VERIFY), (8, 1, PREFILL)], graph=[1, 0, 1, 1])
    )
    graph = ((VERIFY, 1), (VERIFY, 0)), ((VERIFY, 1), (PREFILL, 1))
    assert _pairs(found) == {graph[0]: [(0, 1)], graph[1]: [(2, 3)]}


def test_rejected_rows_and_rows_without_context_are_left_out() -> None:
    status = [int(RowStatus.ACCEPTED), int(RowStatus.REJECTED), int(RowStatus.PLAIN), int(RowStatus.PLAIN)]
    found = repeats(_keys([(7, 0, VERIFY), (7, 0, VERIFY), (0, 0, PREFILL), (0, 0, PREFILL)], status=status))
    assert not found.pairs
    assert (found.rows, found.repeated) == (1, 0)


def test_draft_rows_fed_another_token_are_not_the_same() -> None:
    assert not repeats(_keys([(7, 0, VERIFY), (7, 0, PREFILL)], token=[1, 2])).pairs


def test_ranks_are_kept_apart() -> None:
    assert not repeats(_keys([(7, 0, PREFILL), (7, 0, PREFILL)], row=[3, 3 + (1 << 40)])).pairs


def test_nothing_repeats_in_an_empty_stack() -> None:
    found = repeats(_keys([(0, 0, PREFILL)]))
    assert (found.pairs, found.rows, found.contexts, found.repeated) == ({}, 0, 0, 0)


def test_every_pair_of_a_capture_has_the_same_tokens_before_it(tmp_path: Path) -> None:
    # Of a request sent twice, the second time with more tokens, prefill repeats what decode computed.
    requests = [prompts(1)[0], [*prompts(1)[0], *range(30)]]
    with Trace.open(write_infer(tmp_path / "i.h5", world=World(requests=requests))) as trace:
        keys = stacks_of(trace, "infer")["aux"].keys
        found = repeats(keys)
        assert {left.phase for left, _ in found.pairs} >= {DECODE, VERIFY, PREFILL}
        for pairs in found.pairs.values():
            for a, b in zip(pairs.left, pairs.right, strict=True):
                position = int(keys.position[a])
                tokens = [
                    trace.requests.tokens(int(keys.request[row]))[: position + 1].tolist() for row in (a, b)
                ]
                assert tokens[0] == tokens[1]
                assert a != b
    assert found.repeated == sum(len(p) for p in found.pairs.values()) == 30
