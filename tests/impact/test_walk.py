"""Walking over hits visits what a server would visit, and counts as SGLang counts."""

import numpy as np
import pytest

from hsprobe.impact.model import Acceptance
from hsprobe.impact.walk import chance, lengths, together, walk


def serve(target, drafts, completion: int, steps: int) -> tuple[int, list[int]]:
    """A server's loop, token by token: (verify passes, accepted drafts of each).

    `target[i]` is completion token i, also beyond the end; `drafts[i]` the chain drafted after token i.
    """
    newest, passes = 0, []
    while newest + 1 < completion:
        accepted = 0
        while accepted < steps and drafts[newest][accepted] == target[newest + 1 + accepted]:
            accepted += 1
        newest += accepted + 1
        passes.append(accepted)
    return len(passes), passes


@pytest.mark.parametrize("seed", range(40))
def test_walk_agrees_with_a_server_that_knows_every_token(seed):
    rng = np.random.default_rng(seed)
    steps, completion = int(rng.integers(1, 5)), int(rng.integers(2, 60))
    target = rng.integers(0, 2, size=completion + steps + 1)
    drafts = rng.integers(0, 2, size=(completion, steps))
    passes, accepted = serve(target, drafts, completion, steps)
    hits = np.zeros((steps, completion), bool)
    for head in range(completion):
        for step in range(steps):
            token = head + 1 + step
            hits[step, head] = token < completion and drafts[head][step] == target[token]
    found = walk(hits, completion)
    assert (found.tokens, found.passes) == (completion, passes)
    # The last pass may have run past the end, where what it had accepted is not known.
    known = sum(found.accepted)
    assert passes - 1 <= known <= passes
    assert found.accepted == np.bincount(accepted[:known], minlength=steps + 1).tolist()


def test_walk_ends_where_heads_end():
    hits = np.ones((2, 4), bool)
    found = walk(hits, 100)
    assert (found.tokens, found.passes) == (7, 2)
    assert found.length == 3.5


def test_steps_are_counted_where_all_before_them_were_accepted():
    found = Acceptance(tokens=20, passes=10, accepted=[5, 3, 2])
    assert found.steps == [0.5, 0.4]
    assert Acceptance(tokens=4, passes=3, accepted=[3, 0, 0]).steps == [0.0, None]


def test_lengths_end_at_the_first_miss():
    hits = np.array([[True, True, False], [True, False, True], [True, True, True]])
    assert lengths(hits).tolist() == [3, 1, 0]


def test_requests_together_are_tokens_over_passes_and_one_without_a_pass_says_nothing():
    parts = [Acceptance(9, 3, [0, 3]), Acceptance(1, 0, [0, 0]), Acceptance(3, 3, [3, 0])]
    assert together(parts, 1) == Acceptance(12, 6, [3, 3])


def test_chance_is_none_without_differences_and_wide_where_one_request_makes_all_of_them():
    same = [np.zeros(50), np.zeros(50)]
    assert chance(same) == (0.0, 0.0)
    even = chance([np.full(50, 0.5), np.full(50, 0.5)])
    assert even == (0.5, 0.0)
    mean, error = chance([np.full(50, 1.0), np.zeros(50)])
    assert mean == 0.5
    assert mean < 2 * error
