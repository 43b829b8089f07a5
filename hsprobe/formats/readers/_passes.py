"""Requests put together from forward passes: flat batches whose rows are told apart by positions and lengths.

Letters: T rows of a pass, B requests in it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hsprobe.errors import HsprobeError
from hsprobe.formats.dump import UNKNOWN, Final, Layout, Rows, Sample, Sure
from hsprobe.formats.source import Source
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


class PassReader(ABC):
    """A dump of forward passes as a `Reader`; of each kind of dump, where a pass's batch and tensors lie.

    Attributes:
        layout: see `Reader`; set by each kind.
        passes: names of the passes, in order.
    """

    layout: Layout
    passes: Sequence[str]

    def __init__(self, source: Source) -> None:
        self._source = source
        self._chains: dict[str, Chain] | None = None

    @abstractmethod
    def batch(self, where: str) -> tuple[Ints, Ints, Ints, list[str] | None]:
        """A pass's ids [T], positions [T], lengths [B] and, if known, ids of the requests [B].

        Raises:
            HsprobeError: the dump lacks one of them.
        """

    @abstractmethod
    def tensors(self, where: str) -> dict[str, Stored]:
        """Name in a trace -> tensor [T, H] of a pass."""

    def wanted(self, chain: Chain) -> bool:
        """Whether a request is one of the user's."""
        return True

    def names(self) -> Iterator[str]:
        """See `Reader`. The batch of each pass is read for it."""
        return iter(self._requests())

    def tokens(self, name: str) -> Ints | None:
        """See `Reader`."""
        return _token_ids(self._chain(name))

    def sample(self, name: str) -> Sample:
        """See `Reader`."""
        chain = self._chain(name)
        rows = []
        for piece in chain.pieces:
            for key, found in self.tensors(piece.where).items():
                if found.ndim != 2 or found.shape[0] < piece.first + piece.count:
                    raise damaged(found.name, f"{key} has fewer rows than its pass has tokens")
                part = found.rows(piece.first, piece.first + piece.count)
                rows.append(Rows(key, (part,), piece.start, piece.phase))
        return Sample(name, _token_ids(chain), tuple(rows))

    def described(self, notes: Sequence[str], advice: str) -> Layout:
        """The layout, from the first pass that has something of the residual stream.

        Args:
            advice: what to do where no pass has.
        """
        for where in self.passes:
            try:
                tensors = self.tensors(where)
            except HsprobeError:
                continue
            if tensors:
                hidden = next(iter(tensors.values())).shape[-1]
                final = Final("post", Sure.RECORDED) if "final" in tensors else None
                return Layout(hidden=hidden, final=final, notes=tuple(notes))
        raise HsprobeError(
            f"{self._source.path} holds no output of a layer's input norm, so none of the residual stream.",
            advice,
        )

    def _chain(self, name: str) -> Chain:
        chain = self._requests().get(name)
        if chain is None:
            raise damaged(name, "there is no such request")
        return chain

    def _requests(self) -> dict[str, Chain]:
        if self._chains is None:
            chains = Chains()
            for where in self.passes[:MAX_PASSES]:
                try:
                    chains.add(where, *self.batch(where))
                except HsprobeError as error:
                    self._source.unread.append((where, error.what))
            self._chains = {chain.name: chain for chain in chains.found if self.wanted(chain)}
        return self._chains


def _token_ids(chain: Chain) -> Ints:
    """The token ids of a request. -> [S]"""
    return np.array(chain.tokens, np.int64)
