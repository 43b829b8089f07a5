"""The requests of a capture as texts: tokens, and the rows that hold each position's states on either side.

Letters: T tokens of a request, K chunks of width H.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hsprobe.compare.direct import Lane
from hsprobe.compare.stack import Keys, Rows
from hsprobe.compare.statistics import Floats
from hsprobe.trace.context import context_hashes
from hsprobe.trace.reader import Trace

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Text:
    """One request.

    Attributes:
        request: its index in the capture. rid: its id.
        tokens: prompt and completion, int64. [T]
        prompt_len: P, how many of them were the prompt.
    """

    request: int
    rid: str
    tokens: NDArray[np.int64]
    prompt_len: int

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def contexts(self) -> NDArray[np.uint64]:
        """Context of each token. [T]"""
        return np.array(context_hashes(self.tokens.tolist()), np.uint64)

    @property
    def completion(self) -> int:
        """How many tokens were generated."""
        return len(self.tokens) - self.prompt_len


def texts(trace: Trace) -> list[Text]:
    """The requests of a trace that took a verify pass; the first generated token takes none."""
    requests = trace.requests
    found = [
        Text(r, requests.ids[r], requests.tokens(r), int(requests.prompt_len[r]))
        for r in range(len(requests))
    ]
    return [text for text in found if text.prompt_len > 0 and text.completion > 1]


@dataclass
class Source:
    """Where one side's chunks come from.

    Args:
        lanes: chunk by chunk.
        own: prefer the rows of the request itself, which a capture of the very requests has; rows are else
            looked up by context alone, as for rows that a prefix cache left out.
    """

    lanes: Sequence[Lane]
    own: bool = False
    _places: dict[int, tuple[Rows, Rows]] = field(default_factory=dict)

    @property
    def width(self) -> int:
        return sum(lane.width for lane in self.lanes)

    def rows(self, text: Text, lane: Lane) -> Rows:
        """The row of the lane's stack for each token of a text, -1 where there is none. -> [T]"""
        keys = lane.stack.keys
        found = _by_context(keys, text)
        if self.own:
            mine = self._own_rows(keys, text)
            found = np.where(mine >= 0, mine, found)
        return found

    def read(self, text: Text) -> tuple[Floats, Bools]:
        """(states, whether the row is there). -> [T, K, H], [T]"""
        states = np.zeros((len(text), len(self.lanes), self.lanes[0].width), np.float32)
        there = np.ones(len(text), np.bool_)
        rows_of = {id(lane.stack): self.rows(text, lane) for lane in self.lanes}
        for lane in self.lanes:
            there &= rows_of[id(lane.stack)] >= 0
        blocks = {}
        for k, lane in enumerate(self.lanes):
            key = id(lane.stack)
            if key not in blocks:
                blocks[key] = lane.stack.read(rows_of[key][there])
            states[there, k] = lane.of(blocks[key])
        return states, there

    def _own_rows(self, keys: Keys, text: Text) -> Rows:
        """Rows of the request itself; the first where a position was run more than once. -> [T]"""
        key = id(keys)
        if key not in self._places:
            order = np.argsort(keys.request[keys.usable], kind="stable")
            mine = keys.usable[order]
            self._places[key] = keys.request[mine], mine
        requests, mine = self._places[key]
        low, high = np.searchsorted(requests, [text.request, text.request + 1])
        rows = mine[low:high]
        position = keys.position[rows]
        inside = (position >= 0) & (position < len(text))
        rows, position = rows[inside], position[inside]
        same = keys.context[rows] == text.contexts[position]
        found = np.full(len(text), -1, np.int64)
        # Backwards, so that the first of several rows is the one that stays.
        found[position[same][::-1]] = rows[same][::-1]
        return found


def _by_context(keys: Keys, text: Text) -> Rows:
    contexts, rows = keys.by_context
    found = np.full(len(text), -1, np.int64)
    if not len(contexts):
        return found
    at = np.minimum(np.searchsorted(contexts, text.contexts), len(contexts) - 1)
    hit = contexts[at] == text.contexts
    hit &= keys.position[rows[at]] == np.arange(len(text))
    found[hit] = rows[at[hit]]
    return found
