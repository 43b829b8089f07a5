"""The verify passes that a request would take, as SGLang counts them.

A request of T tokens, P of them the prompt: prefill gives token P. A pass drafts from head h, the row of the
last token that the target has been run on, and its chain names tokens h+2, h+3, ...; with `a` of them
accepted it emits a+1 tokens, and the next pass drafts from h+a+1. Which heads are visited thus depends on
what is accepted. The first head is P-1.

SGLang's figures (0.5.9 to 0.5.23, `managers/tokenizer_manager.py` and the scheduler's batch result
processor): `spec_accept_length` is completion tokens over verify passes, the token that prefill gives
included and whatever the last pass emits beyond the request's end left out; the histogram counts passes by
accepted drafts, the last pass in full.

Letters: S drafting steps, N heads (every one from P-1 on, visited or not).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from hsprobe.impact.model import Acceptance

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


def lengths(hits_SN: Bools) -> Ints:
    """How many drafts each head has accepted: the steps before the first that misses. -> [N]"""
    found: Ints = np.logical_and.accumulate(hits_SN, axis=0).sum(axis=0, dtype=np.int64)
    return found


def walk(hits_SN: Bools, tokens_left: int) -> Acceptance:
    """Visit heads as the server would.

    Args:
        hits_SN: whether step s of the chain from head n names the target's token; False where that token is
            beyond the known ones.
        tokens_left: completion tokens that can be counted: those of the request, or fewer where the states
            of later rows are not known.
    """
    steps, heads = hits_SN.shape
    accepted = lengths(hits_SN)
    histogram = [0] * (steps + 1)
    passes, emitted = 0, 1
    while emitted < tokens_left and emitted - 1 < heads:
        drafts = int(accepted[emitted - 1])
        # Emitted tokens number emitted..emitted+drafts, the last of them the target's own.
        whole = drafts == steps or emitted + drafts < tokens_left
        histogram[drafts] += whole
        passes += 1
        emitted += drafts + 1
    return Acceptance(min(emitted, tokens_left), passes, histogram)


def together(parts: Iterable[Acceptance], steps: int) -> Acceptance:
    """All requests as one: tokens over passes, as the server's average over its traffic."""
    tokens, passes, histogram = 0, 0, [0] * (steps + 1)
    for part in parts:
        if part.passes:
            tokens, passes = tokens + part.tokens, passes + part.passes
            histogram = [a + b for a, b in zip(histogram, part.accepted, strict=True)]
    return Acceptance(tokens, passes, histogram)


def chance(differences: list[NDArray[np.float64]]) -> tuple[float, float]:
    """(mean, standard error of the mean) of paired differences, one array a request.

    Heads of one request are not independent, so the error is that of the requests' sums; with one request it
    is that of the heads.
    """
    groups = differences if len(differences) > 1 else [np.atleast_1d(x) for one in differences for x in one]
    count = sum(len(one) for one in groups)
    if not count:
        return 0.0, 0.0
    mean = float(sum(one.sum() for one in groups)) / count
    if len(groups) < 2:
        return mean, float("inf")
    spread = sum(float((one - mean).sum()) ** 2 for one in groups)
    return mean, float(np.sqrt(spread * len(groups) / (len(groups) - 1))) / count
