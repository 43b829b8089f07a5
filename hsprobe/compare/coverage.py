"""How many training rows found a partner, and why the others did not."""

from __future__ import annotations

import bisect
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from hsprobe.compare.absence import (
    BEYOND,
    NO_TOKENS,
    NOT_CAPTURED,
    TOKENS_DIFFER,
    TRUNCATED,
    Absence,
)
from hsprobe.compare.stack import COMPARABLE, Rows, Stack
from hsprobe.trace.reader import Trace
from hsprobe.trace.schema import RowStatus

_EXAMPLES = 3
_AROUND = 3


@dataclass(frozen=True)
class Drift:
    """A training request whose token ids part from the captured ones.

    Attributes:
        position: the first that differs.
        train_ids, infer_ids: ids around it, from `start` on.
    """

    train_request: str
    infer_request: str
    position: int
    start: int
    train_ids: list[int]
    infer_ids: list[int]


@dataclass
class Coverage:
    """Counted over the training rows with distinct contexts.

    Attributes:
        recorded: all rows of the training tensor; `train_rows`, `repeats` and `left_out_train` add up to it.
        repeats: training rows with the same tokens up to and including their own as another, compared once.
        reasons: why rows have no partner -> how many.
        left_out_train, left_out_infer: status (rejected, padding...) -> rows never compared for it.
    """

    recorded: int = 0
    repeats: int = 0
    train_rows: int = 0
    matched: int = 0
    infer_rows: int = 0
    infer_matched: int = 0
    train_requests: int = 0
    matched_requests: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    drifts: list[Drift] = field(default_factory=list)
    left_out_train: dict[str, int] = field(default_factory=dict)
    left_out_infer: dict[str, int] = field(default_factory=dict)

    @property
    def share(self) -> float:
        return self.matched / self.train_rows if self.train_rows else 0.0


def cover(train_trace: Trace, infer_trace: Trace, train: Stack, infer: Stack) -> Coverage:
    """Coverage of the training rows of `train` by the rows of `infer`, with a reason for every gap."""
    contexts, rows = train.keys.by_context
    there, _ = infer.keys.by_context
    hit = np.isin(contexts, there, assume_unique=True)
    requests = train.keys.request[rows]
    result = Coverage(
        recorded=train.rows,
        repeats=len(train.keys.usable) - len(rows),
        train_rows=len(rows),
        matched=int(np.count_nonzero(hit)),
        infer_rows=len(infer.keys.usable),
        infer_matched=int(np.count_nonzero(np.isin(infer.keys.context[infer.keys.usable], contexts))),
        train_requests=len(np.unique(requests)),
        matched_requests=len(np.unique(requests[hit])),
        left_out_train=_left_out(train),
        left_out_infer=_left_out(infer),
    )
    missing = rows[~hit]
    if len(missing):
        _explain(result, train_trace, infer_trace, train, infer, missing)
    return result


def _left_out(stack: Stack) -> dict[str, int]:
    """Rows that are never compared, by status; `no context` for those whose tokens are not known."""
    counts = np.bincount(stack.keys.status, minlength=len(RowStatus)).tolist()
    found = {status.name.lower(): counts[status] for status in RowStatus if status not in COMPARABLE}
    found["no context"] = sum(counts[status] for status in COMPARABLE) - len(stack.keys.usable)
    return {name: count for name, count in found.items() if count}


def _explain(
    result: Coverage, train_trace: Trace, infer_trace: Trace, train: Stack, infer: Stack, missing: Rows
) -> None:
    last = _last_positions(infer, len(infer_trace.requests.ids))
    partners = _Partners(train_trace, infer_trace)
    reasons: Counter[str] = Counter()
    missing = missing[np.argsort(train.keys.request[missing], kind="stable")]
    absence = Absence(infer_trace, infer, train.keys.context[missing])
    requests, first = np.unique(train.keys.request[missing], return_index=True)
    groups = zip(requests, np.split(missing, first[1:]), np.split(absence.codes, first[1:]), strict=True)
    for request, rows, codes in groups:
        if request < 0 or request >= len(train_trace.requests.ids):
            reasons[NO_TOKENS] += len(rows)
            continue
        partner, shared, whole = partners.of(int(request))
        position = train.keys.position[rows]
        shares = position < shared
        # The last token of a generation is never fed back, so its row is not missing: it is past the end.
        ended = shares & (position > last[partner]) & (partner >= 0)
        reasons[BEYOND] += int(np.count_nonzero(ended))
        inside = shares & ~ended
        reasons.update(absence.reasons(codes[inside], position[inside], partner))
        outside = int(np.count_nonzero(~shares))
        if partner < 0:
            reasons[NOT_CAPTURED] += outside
        elif whole:
            reasons[TRUNCATED] += outside
        elif outside:
            reasons[TOKENS_DIFFER] += outside
            if len(result.drifts) < _EXAMPLES:
                result.drifts.append(_drift(train_trace, infer_trace, int(request), partner, shared))
    result.reasons = {reason: count for reason, count in reasons.most_common() if count}


def _last_positions(stack: Stack, requests: int) -> Rows:
    """The last position of each request that has a usable row, -1 without one. -> [R]"""
    last = np.full(max(requests, 1), -1, np.int64)
    rows = stack.keys.usable[stack.keys.request[stack.keys.usable] >= 0]
    np.maximum.at(last, stack.keys.request[rows], stack.keys.position[rows])
    return last


def _drift(train_trace: Trace, infer_trace: Trace, mine: int, other: int, position: int) -> Drift:
    start = max(0, position - _AROUND)
    stop = position + _AROUND + 1
    return Drift(
        train_request=str(train_trace.requests.ids[mine]),
        infer_request=str(infer_trace.requests.ids[other]),
        position=position,
        start=start,
        train_ids=[int(t) for t in train_trace.requests.tokens(mine)[start:stop]],
        infer_ids=[int(t) for t in infer_trace.requests.tokens(other)[start:stop]],
    )


class _Partners:
    """For each training request the captured request that shares its longest prefix."""

    def __init__(self, train: Trace, infer: Trace) -> None:
        self.train = [_bytes(train.requests.tokens(r)) for r in range(len(train.requests.ids))]
        captured = [_bytes(infer.requests.tokens(r)) for r in range(len(infer.requests.ids))]
        self.order = sorted(range(len(captured)), key=lambda r: captured[r])
        self.sorted = [captured[r] for r in self.order]
        # A captured request that agrees with some training request to its end is that request, and is not
        # another one gone astray because both begin with the same system prompt.
        self.taken = set()
        for mine in self.train:
            at, shared = self._best(mine)
            if at >= 0 and shared == min(len(mine), len(self.sorted[at])) // 8:
                self.taken.add(at)

    def of(self, request: int) -> tuple[int, int, bool]:
        """(captured request or -1, tokens shared, whether one of the two is a prefix of the other)."""
        mine = self.train[request]
        at, shared = self._best(mine)
        if at >= 0 and shared == min(len(mine), len(self.sorted[at])) // 8:
            return self.order[at], shared, True
        free, free_shared = self._best(mine, self.taken)
        if free < 0 or (free_shared == 0 and not _alike(mine, self.sorted[free])):
            return -1, shared, False
        return self.order[free], max(shared, free_shared), False

    def _best(self, mine: bytes, without: set[int] | frozenset[int] = frozenset()) -> tuple[int, int]:
        """Where the longest shared prefix is (in sorted order) and its length in tokens."""
        middle = bisect.bisect_left(self.sorted, mine)
        below = next((i for i in range(middle - 1, -1, -1) if i not in without), -1)
        above = next((i for i in range(middle, len(self.sorted)) if i not in without), -1)
        scored = [(_shared(mine, self.sorted[i]), i) for i in (below, above) if i >= 0]
        if not scored:
            return -1, 0
        shared, at = max(scored)
        return at, shared


def _bytes(tokens: object) -> bytes:
    """Token ids as bytes that sort as the ids do."""
    return np.asarray(tokens, np.int64).astype(">i8").tobytes()


def _shared(a: bytes, b: bytes) -> int:
    """Number of leading token ids that two requests share."""
    n = min(len(a), len(b))
    x, y = np.frombuffer(a[:n], ">i8"), np.frombuffer(b[:n], ">i8")
    differ = np.flatnonzero(x != y)
    return int(differ[0]) if len(differ) else n // 8


def _alike(a: bytes, b: bytes) -> bool:
    """Whether two requests consist of the same ids for the most part, wherever they stand."""
    x, y = set(np.frombuffer(a, ">i8").tolist()), set(np.frombuffer(b, ">i8").tolist())
    return 2 * len(x & y) > min(len(x), len(y))
