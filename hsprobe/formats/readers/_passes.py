"""Requests put together from forward passes: flat batches whose rows are told apart by positions and lengths.

Letters: T rows of a pass, B requests in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hsprobe.formats.dump import UNKNOWN, Rows, Sample
from hsprobe.formats.stored import Ints, Stored, damaged
from hsprobe.trace.schema import Phase

MAX_PASSES = 50_000
_MAX_LENGTH = 1 << 22


@dataclass(frozen=True)
class Piece:
    """Rows first..first+count of a pass: positions start.. of one request."""

    where: str
    first: int
    count: int
    start: int
    phase: Phase


@dataclass
class Chain:
    """One request: its tokens so far, the first UNKNOWN where a prefix cache spared the pass that had it."""

    name: str
    tokens: list[int]
    pieces: list[Piece] = field(default_factory=list)


class Chains:
    """Takes passes in order and joins their rows into requests.

    Without the ids of requests, a decode row is joined to the request that has come just as far; where
    several have, in the order of the batch, which SGLang keeps. Several rows that begin within a request are
    joined to none then: whose prefix the cache spared it cannot be told.

    A request whose first tokens were in no pass, because a prefix cache spared them, is left out: without
    them none of its rows has a context. One lost token is no more than a dump may lack.

    Attributes:
        found: the requests, in order of appearance.
        left_out: passes that make no sense so: verify passes (their rows are drafts), idle ones.
        headless: requests left out.
    """

    def __init__(self) -> None:
        self.found: list[Chain] = []
        self.left_out = 0
        self.headless = 0
        self._live: list[Chain] = []
        self._by_id: dict[str, Chain] = {}

    def add(self, where: str, ids: Ints, positions: Ints, lengths: Ints, rids: Sequence[str] | None) -> None:
        """One pass.

        Args:
            where: its name.
            ids, positions: [T].
            lengths: [B] each request's length with this pass.
            rids: [B], None where the requests have no ids.
        """
        cut = _cut(positions, lengths)
        if cut is None or len(ids) < len(positions):
            self.left_out += 1
            return
        decode = all(count == 1 and start > 0 for _, count, start in cut)
        phase = Phase.DECODE if decode else Phase.PREFILL
        taken: list[Chain] = []
        waiting = self._waiting(cut)
        for number, (first, count, start) in enumerate(cut):
            rid = rids[number] if rids is not None and number < len(rids) else None
            if rid is not None:
                known = self._by_id.get(rid)
                chain = known if known is not None and len(known.tokens) == start else None
            else:
                chain = next(waiting[start], None) if count == 1 else None
            if chain is None and start > 1:
                self.headless += 1
                continue
            if chain is None:
                chain = self._begin(rid or f"{where}[{number}]", start)
            chain.tokens += ids[first : first + count].tolist()
            chain.pieces.append(Piece(where, first, count, start, phase))
            taken.append(chain)
        # Every running request takes part in every decode pass: what does not has ended.
        self._live = taken if decode else [*self._live, *(one for one in taken if one not in self._live)]

    def _begin(self, name: str, start: int) -> Chain:
        chain = Chain(name, [UNKNOWN] * start)
        self.found.append(chain)
        self._by_id[name] = chain
        return chain

    def _waiting(self, cut: Sequence[tuple[int, int, int]]) -> Mapping[int, Iterator[Chain]]:
        """Position -> the requests that could go on there, in order; none where that cannot be told."""
        wanted: dict[int, int] = defaultdict(int)
        for _, _, start in cut:
            wanted[start] += start > 0
        found: dict[int, list[Chain]] = defaultdict(list)
        for chain in self._live:
            found[len(chain.tokens)].append(chain)
        return {start: iter(found[start] if len(found[start]) == n else []) for start, n in wanted.items()}


def _cut(positions: Ints, lengths: Ints) -> list[tuple[int, int, int]] | None:
    """(first row, rows, first position) of each request; None for a pass of another kind. Padding is left."""
    found, at = [], 0
    for length in lengths.tolist():
        start = int(positions[at]) if at < len(positions) else -1
        count = length - start
        if not (0 <= start < length <= _MAX_LENGTH and at + count <= len(positions)):
            return None
        if not np.array_equal(positions[at : at + count], np.arange(start, length)):
            return None
        found.append((at, count, start))
        at += count
    return found or None


def sample(name: str, chain: Chain, tensors: Mapping[str, Mapping[str, Stored]]) -> Sample:
    """A request as a sample.

    Args:
        tensors: pass -> name in a trace -> the tensor of that pass [T, H].
    """
    rows = []
    for piece in chain.pieces:
        for key, found in tensors[piece.where].items():
            if found.ndim != 2 or found.shape[0] < piece.first + piece.count:
                raise damaged(found.name, f"{key} has fewer rows than its pass has tokens")
            part = found.rows(piece.first, piece.first + piece.count)
            rows.append(Rows(key, (part,), piece.start, piece.phase))
    return Sample(name, token_ids(chain), tuple(rows))


def token_ids(chain: Chain) -> Ints:
    """The token ids of a request. -> [S]"""
    return np.array(chain.tokens, np.int64)
