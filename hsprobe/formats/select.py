"""Choose the samples of a dump that a capture can be compared with, from their token ids alone.

Letters: S tokens of a sample.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hsprobe.formats.dump import UNKNOWN
from hsprobe.formats.stored import Ints

_EACH = 2
"""Samples kept for a captured request: the one that fits best, and one more that shares as much."""
_GRAM = 4
_MOST_GRAM_TOKENS = 4096
_FALLBACK = 8
_Grams = npt.NDArray[np.uint64]


@dataclass(frozen=True, order=True)
class _Fit:
    """How well a sample fits a captured request; larger is better."""

    shared: int
    alike: int
    # Of equal ones the earlier sample is kept.
    before: int
    name: str = field(compare=False)


@dataclass
class Needed:
    """Offered one sample after the other, keeps the names of those to read.

    Args:
        requests: token ids of each captured request.
        prompt_lens: how many of them were the prompt.
    """

    requests: Sequence[Ints]
    prompt_lens: Sequence[int]
    offered: int = 0

    def __post_init__(self) -> None:
        self._whole = _Sorted(self.requests, 0)
        # For dumps that have lost the first token of each sample.
        self._tail = _Sorted(self.requests, 1)
        self._grams, self._owner = _grams_of_all(self.requests)
        self._best: list[list[_Fit]] = [[] for _ in self.requests]
        self._open = {r for r, length in enumerate(self.prompt_lens) if length > 0}
        self._first: list[str] = []

    @property
    def complete(self) -> bool:
        """Whether every captured prompt has a sample that holds all of it, so that no other is needed."""
        return not self._open

    def offer(self, name: str, tokens: Ints) -> None:
        """Consider a sample."""
        self.offered += 1
        if len(self._first) < _FALLBACK:
            self._first.append(name)
        lost = bool(len(tokens)) and int(tokens[0]) == UNKNOWN
        table, known = (self._tail, tokens[1:]) if lost else (self._whole, tokens)
        shared, sharers = table.longest(known)
        if shared:
            for request in sharers:
                self._keep(request, _Fit(shared, 0, -self.offered, name))
                if shared + lost >= self.prompt_lens[request]:
                    self._open.discard(request)
        request, alike = self._alike(tokens)
        if alike:
            self._keep(request, _Fit(shared if request in sharers else 0, alike, -self.offered, name))

    def settle(self, names: Sequence[str], offered: int, complete: bool) -> None:
        """Take what was chosen as found, be it in an earlier run."""
        self._best, self._first, self.offered = [], list(names), offered
        if complete:
            self._open = set()

    def chosen(self) -> list[str]:
        """The samples to read, in the order offered; where none fits, a few to show how they differ."""
        fits = {(-fit.before, fit.name) for found in self._best for fit in found}
        return [name for _, name in sorted(fits)] or self._first

    def first_token(self, tokens: Ints) -> int:
        """The token id that stands before these in the request that shares most of them, else UNKNOWN."""
        shared, sharers = self._tail.longest(tokens)
        return int(self.requests[sharers[0]][0]) if shared else UNKNOWN

    def _keep(self, request: int, fit: _Fit) -> None:
        found = self._best[request]
        if any(fit.name == other.name for other in found):
            return
        if len(found) < _EACH:
            heapq.heappush(found, fit)
        else:
            heapq.heappushpop(found, fit)

    def _alike(self, tokens: Ints) -> tuple[int, int]:
        """The request that shares most runs of ids with a sample, wherever they stand, and how many."""
        grams = _grams(tokens[:_MOST_GRAM_TOKENS])
        if not len(grams) or not len(self._grams):
            return 0, 0
        at = np.minimum(np.searchsorted(self._grams, grams), len(self._grams) - 1)
        owners = self._owner[at[self._grams[at] == grams]]
        if not len(owners):
            return 0, 0
        counts = np.bincount(owners)
        return int(counts.argmax()), int(counts.max())


class _Sorted:
    """Requests in the order of their ids, to find the longest shared beginning."""

    def __init__(self, requests: Sequence[Ints], without: int) -> None:
        keyed = sorted(
            (_key(tokens[without:]), r) for r, tokens in enumerate(requests) if len(tokens) > without
        )
        self.keys = [key for key, _ in keyed]
        self.owners = [owner for _, owner in keyed]

    def longest(self, tokens: Ints) -> tuple[int, list[int]]:
        """(ids shared, the requests that share so many); next to where it would stand, nothing is closer."""
        mine = _key(tokens)
        middle = bisect.bisect_left(self.keys, mine)
        near = range(max(0, middle - 1), min(len(self.keys), middle + 1))
        shared = max((_shared(mine, self.keys[i]) for i in near), default=0)
        if not shared:
            return 0, []
        # All that begin so stand side by side.
        begin = mine[: shared * 8]
        low = bisect.bisect_left(self.keys, begin)
        high = low
        while high < len(self.keys) and self.keys[high].startswith(begin) and high - low < 64:
            high += 1
        return shared, self.owners[low:high]


def _key(tokens: Ints) -> bytes:
    """Ids as bytes that sort as the ids do."""
    return np.asarray(tokens, np.int64).astype(">i8").tobytes()


def _shared(a: bytes, b: bytes) -> int:
    n = min(len(a), len(b))
    differ = np.flatnonzero(np.frombuffer(a[:n], ">i8") != np.frombuffer(b[:n], ">i8"))
    return int(differ[0]) if len(differ) else n // 8


def _grams(tokens: Ints) -> _Grams:
    """A hash of every run of a few ids."""
    count = len(tokens) - _GRAM + 1
    if count <= 0:
        return np.zeros(0, np.uint64)
    ids = tokens.astype(np.uint64)
    found = np.zeros(count, np.uint64)
    for offset in range(_GRAM):
        found = found * np.uint64(0x9E3779B97F4A7C15) + ids[offset : offset + count] + np.uint64(1)
    return found


def _grams_of_all(requests: Sequence[Ints]) -> tuple[_Grams, Ints]:
    """Runs that only one request has, sorted, and that request; a common template tells nothing."""
    each = [np.unique(_grams(tokens)) for tokens in requests]
    if not each:
        return np.zeros(0, np.uint64), np.zeros(0, np.int64)
    grams = np.concatenate(each)
    owners = np.repeat(np.arange(len(each), dtype=np.int64), [len(one) for one in each])
    found, first, counts = np.unique(grams, return_index=True, return_counts=True)
    return found[counts == 1], owners[first[counts == 1]]
