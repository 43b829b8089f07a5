"""Why a row that a capture should hold is not there, as far as its labels tell."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from hsprobe.compare.stack import COMPARABLE, Rows, Stack
from hsprobe.trace.reader import Rank, Trace
from hsprobe.trace.schema import CaptureMode, Phase

NOT_CAPTURED = "request never captured"
TOKENS_DIFFER = "token ids differ"
BEYOND = "past the last row of the captured request"
TRUNCATED = "past the end of the captured request, which is shorter"
NO_TOKENS = "training rows without token ids"
PREFIX_CACHE = "before the first row computed (prefix cache)"
CHUNKED = "in an earlier chunk of a chunked prefill, not kept"
LAST_ONLY = "computed, but only the last row of the pass was kept (LAST where FULL was needed)"
NO_STATES = "computed, but the server kept no states of the pass (NULL)"
REJECTED = "seen only as rejected draft tokens"
OTHER_SITE = "computed there, but not recorded at this site"
NOT_COMPUTED = "not computed there, or lost"

# In ascending order of how much they say: of several rows with one context, the strongest speaks.
_REASONS = (NOT_COMPUTED, REJECTED, OTHER_SITE, CHUNKED, LAST_ONLY, NO_STATES)
_CODE = {reason: code for code, reason in enumerate(_REASONS)}

Codes = NDArray[np.int64]


class Absence:
    """Looks missing contexts up in everything that was computed, recorded at a site or not.

    Args:
        site: the stack that lacks them. contexts: [M] uint64, distinct.

    Attributes:
        codes: [M] what is known of each.
    """

    def __init__(self, trace: Trace, site: Stack, contexts: NDArray[np.uint64]) -> None:
        self.codes: Codes = np.zeros(len(contexts), np.int64)
        self._first = np.full(max(len(trace.requests.ids), 1), np.iinfo(np.int64).max)
        model = int(site.keys.model[site.keys.usable[0]]) if len(site.keys.usable) else 0
        order = np.argsort(contexts)
        known = contexts[order]
        for rank in trace.ranks:
            passes = rank.rows["pass"]
            mine = np.flatnonzero(rank.passes["model"][passes] == model)
            self._note_first(rank, mine)
            if not len(known):
                continue
            at = np.minimum(np.searchsorted(known, rank.rows["context"][mine]), len(known) - 1)
            hit = known[at] == rank.rows["context"][mine]
            codes = _codes(rank, site, mine[hit])
            best = np.zeros(len(known), np.int64)
            np.maximum.at(best, at[hit], codes)
            self.codes[order] = np.maximum(self.codes[order], best)

    def reasons(self, codes: Codes, position: Rows, request: int) -> Counter[str]:
        """Why rows at these positions of one captured request are missing."""
        found: Counter[str] = Counter()
        cached = (codes == _CODE[NOT_COMPUTED]) & (position < self._first[request])
        found[PREFIX_CACHE] += int(np.count_nonzero(cached))
        for code, count in enumerate(np.bincount(codes[~cached], minlength=len(_REASONS)).tolist()):
            found[_REASONS[code]] += count
        return found

    def _note_first(self, rank: Rank, rows: Rows) -> None:
        """Keep the first position that was computed of each request."""
        requests = rank.rows["request"][rows]
        ok = (requests >= 0) & np.isin(rank.rows["status"][rows], COMPARABLE)
        np.minimum.at(self._first, requests[ok], rank.rows["position"][rows][ok])


def _codes(rank: Rank, site: Stack, rows: Rows) -> Codes:
    """What the labels of rows say about their absence at a site."""
    passes = rank.rows["pass"][rows]
    mode, phase = rank.passes["mode"][passes], rank.passes["phase"][passes]
    codes = np.full(len(rows), _CODE[OTHER_SITE], np.int64)
    codes[(phase == int(Phase.PREFILL)) & _continued(rank, rows)] = _CODE[CHUNKED]
    codes[mode == int(CaptureMode.LAST)] = _CODE[LAST_ONLY]
    codes[mode == int(CaptureMode.NULL)] = _CODE[NO_STATES]
    codes[~np.isin(rank.rows["status"][rows], COMPARABLE)] = _CODE[REJECTED]
    return codes


def _continued(rank: Rank, rows: Rows) -> NDArray[np.bool_]:
    """Whether the request of each row has a later prefill pass, so that its own is not the last chunk."""
    passes, requests = rank.rows["pass"], rank.rows["request"]
    prefill = np.flatnonzero((rank.passes["phase"][passes] == int(Phase.PREFILL)) & (requests >= 0))
    last = np.full(int(requests.max(initial=0)) + 1, -1, np.int64)
    np.maximum.at(last, requests[prefill], passes[prefill])
    mine = requests[rows]
    return np.where(mine >= 0, passes[rows] < last[np.maximum(mine, 0)], False)
