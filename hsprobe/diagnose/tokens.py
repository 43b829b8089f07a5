"""Whether both sides were given the same prompts, and if not, where and how their token ids part.

Only prompts are looked at: what is generated may differ for many reasons, all of them consequences.

Letters: A training prompt, B captured prompt; `A[i] == B[i + shift]` where they agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hsprobe.compare.align import Pairs
from hsprobe.compare.direct import Lane
from hsprobe.compare.statistics import row_errors
from hsprobe.diagnose.stream import by_place, looked_up
from hsprobe.trace.reader import Requests, Trace

_GRAM, _SHORT_GRAM = 6, 3
_AROUND = 3
# Prompts that differ in so large a share of the requests are no accident.
_MANY = 0.3
_LARGEST_SHIFT = 2
_POSITION_BITS = 32


@dataclass(frozen=True)
class Parting:
    """A training request whose prompt differs from the captured one.

    Attributes:
        train, infer: the requests. position: the first id that differs.
        shift: by how many positions the ids agree again after it; 0 for a replaced id.
        start: position of the first of `train_ids` and `infer_ids`, the ids around.
    """

    train: int
    infer: int
    position: int
    shift: int
    start: int
    train_ids: list[int]
    infer_ids: list[int]


@dataclass
class Tokens:
    """How the prompts of both sides compare.

    Attributes:
        agreed: training requests whose prompt was captured as it is. parted: those that differ.
        names: names of (training requests, captured requests).
        shifted: the ids of the dump are so many positions ahead of its states; 0 where they are not.
    """

    agreed: int = 0
    parted: list[Parting] = field(default_factory=list)
    names: tuple[Sequence[str], Sequence[str]] = ((), ())
    shifted: int = 0

    @property
    def many(self) -> bool:
        """Whether so many prompts differ that it is no accident."""
        return len(self.parted) > 0 and len(self.parted) >= _MANY * (len(self.parted) + self.agreed)


def compare_prompts(train: Trace, infer: Trace) -> Tokens:
    """Match every training prompt with the captured one that is most like it, and compare."""
    captured = [_prompt(infer.requests, r) for r in range(len(infer.requests.ids))]
    grams = _grams(captured)
    found = Tokens(names=(train.requests.ids, infer.requests.ids))
    for request in range(len(train.requests.ids)):
        mine = _prompt(train.requests, request)
        matches = _matches(mine, grams)
        shared = {other: _shared(mine, captured[other]) for other, _ in matches}
        if any(shared[o] == min(len(mine), len(captured[o])) for o in shared):
            found.agreed += 1
        elif matches:
            # What they share from the first id on is a better sign than any other.
            other, shift = max(matches, key=lambda one: shared[one[0]])
            found.parted.append(_parting(request, other, shared[other], shift, mine, captured[other]))
    return found


def _prompt(requests: Requests, request: int) -> list[int]:
    tokens = [int(token) for token in requests.tokens(request)]
    length = int(requests.prompt_len[request])
    return tokens[:length] if 0 < length <= len(tokens) else tokens


def _grams(prompts: Sequence[Sequence[int]]) -> dict[tuple[int, ...], list[tuple[int, int]]]:
    found: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for number, prompt in enumerate(prompts):
        size = _size(prompt)
        for start in range(len(prompt) - size + 1):
            found.setdefault(tuple(prompt[start : start + size]), []).append((number, start))
    return found


def _size(prompt: Sequence[int]) -> int:
    return _GRAM if len(prompt) >= 2 * _GRAM else _SHORT_GRAM


def _matches(
    mine: Sequence[int], grams: dict[tuple[int, ...], list[tuple[int, int]]]
) -> list[tuple[int, int]]:
    """(captured request, shift) of the requests that share most pieces, the best four."""
    votes: Counter[tuple[int, int]] = Counter()
    for size in {_size(mine), _SHORT_GRAM} if len(mine) < 4 * _GRAM else {_GRAM}:
        for start in range(len(mine) - size + 1):
            for other, at in grams.get(tuple(mine[start : start + size]), ())[:8]:
                votes[other, at - start] += 1
    # A system prompt shared by all is no match: half of the prompt has to be.
    enough = 0.5 * (len(mine) - _size(mine) + 1) / 2
    return [pair for pair, count in votes.most_common(4) if count >= enough]


def _shared(mine: Sequence[int], other: Sequence[int]) -> int:
    """Number of leading ids that agree."""
    n = min(len(mine), len(other))
    differ = np.flatnonzero(np.asarray(mine[:n]) != np.asarray(other[:n]))
    return int(differ[0]) if len(differ) else n


def _parting(
    request: int, other: int, position: int, shift: int, mine: Sequence[int], theirs: Sequence[int]
) -> Parting:
    start = max(0, position - _AROUND)
    stop = position + _AROUND + 1
    return Parting(request, other, position, shift, start, list(mine[start:stop]), list(theirs[start:stop]))


def shifted_ids(tokens: Tokens, trained: Lane, served: Lane, noise: float) -> int:
    """By how many positions a dump's ids are ahead of its states; 0 where they are not.

    The ids of such a dump agree with the captured ones at a shift, and its states, row by row, without it.
    """
    shifts = {parting.shift for parting in tokens.parted}
    if len(shifts) != 1 or tokens.agreed >= len(tokens.parted):
        return 0
    shift = shifts.pop()
    if not 0 < abs(shift) <= _LARGEST_SHIFT:
        return 0
    pairs = _by_position(tokens.parted, trained, served)
    if len(pairs) < 4:
        return 0
    a, b = trained.of(trained.stack.read(pairs.left)), served.of(served.stack.read(pairs.right))
    errors = row_errors(a, b, np.maximum(trained.scale(pairs.left), served.scale(pairs.right)))
    return shift if float(np.nanmedian(errors)) <= 3 * noise else 0


def _by_position(parted: Sequence[Parting], trained: Lane, served: Lane) -> Pairs:
    """Rows of the matched requests that stand at the same position, within the prompt."""
    mine, theirs = trained.stack.keys, served.stack.keys
    table, at = by_place(theirs)
    partner = {parting.train: parting.infer for parting in parted}
    rows = mine.usable[np.isin(mine.request[mine.usable], list(partner))]
    other = np.array([partner[request] for request in mine.request[rows].tolist()], np.int64)
    found = looked_up(table, at, (other << _POSITION_BITS) + mine.position[rows])
    return Pairs(rows[found >= 0], found[found >= 0])
