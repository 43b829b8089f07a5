"""The rows that a draft computed, in order: where each stands in its request, and which keys it sees.

A row's *slot* is its place in the request, as the target's own passes tell it, whatever RoPE position the
draft was given: row p takes the target's state at position p. Later steps of a chain take the slots after.

Letters: T rows of the draft in one rank, S slots.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hsprobe.trace.context import context_hashes
from hsprobe.trace.reader import Rank, Trace
from hsprobe.trace.schema import Model, Phase, RowStatus

Ints = npt.NDArray[np.int64]
NONE = -1


@dataclass
class _State:
    """What is known of a request while its passes go by.

    Attributes:
        positions, accepted: of the target's last pass: positions of its rows, how many were accepted.
        selected: the draft's row from which the next chain goes on. chain: rows of the chain so far.
        writers: row that last wrote each slot. before: slots filled before the first row of this request.
    """

    positions: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    accepted: int = NONE
    selected: int = NONE
    chain: list[int] = field(default_factory=list)
    block: tuple[int, int] = (0, 0)
    writers: dict[int, int] = field(default_factory=dict)
    before: int = NONE


@dataclass
class Timeline:
    """Columns over the draft's rows of one rank, in the order in which they ran. All [T].

    Attributes:
        row: index into the rank's row table. number: index of the pass.
        phase, request, token, position: as recorded.
        slot: place in the request, NONE where it cannot be told. step: 0 for rows fed by the target, 1 and on
            for the steps of a chain.
        after: the row whose output this one continues, NONE for step 0.
        first, last: rows of the same request in the same pass: from first up to but not including last.
        cached: how many slots before the request's first row came from a prefix cache.
        expected: the token that follows the slot in the request, NONE where it is not known.
        committed: step 0 only: whether the row belongs to an accepted token.
        context: hash of the tokens up to the slot, 0 where it is not known.
    """

    row: Ints
    number: Ints
    phase: Ints
    request: Ints
    token: Ints
    position: Ints
    slot: Ints
    step: Ints
    after: Ints
    first: Ints
    last: Ints
    cached: Ints
    expected: Ints
    committed: npt.NDArray[np.bool_]
    context: npt.NDArray[np.uint64]
    tokens_of: list[Ints] = field(default_factory=list)
    verified: dict[int, int] = field(default_factory=dict)
    """Row -> the token that the target verified as proposed by it."""

    def __len__(self) -> int:
        return len(self.row)

    def seen_by(self, wanted: Iterable[int]) -> dict[int, Ints]:
        """For rows with a slot: the rows whose keys lie in slots 0..slot when they run; NONE for unknown.

        Slots that a prefix cache filled are those of an earlier row with the same tokens up to and including
        the next, if one was recorded.
        """
        asked = set(wanted)
        found: dict[int, Ints] = {}
        writers: dict[int, dict[int, int]] = {}
        known = self._by_content()
        for index in np.flatnonzero(self.slot >= 0).tolist():
            request = int(self.request[index])
            mine = writers.setdefault(request, {})
            if not mine:
                mine.update(self._cached_rows(index, known))
            mine[int(self.slot[index])] = index
            if index in asked:
                found[index] = np.array(
                    [mine.get(s, NONE) for s in range(int(self.slot[index]) + 1)], np.int64
                )
        return found

    def twins(self, index: int, slot: int) -> list[int]:
        """Earlier rows with the same tokens up to a slot of this row's request, fed another next token."""
        tokens = self.tokens_of[int(self.request[index])]
        if slot + 1 >= len(tokens):
            return []
        context = context_hashes(tokens[: slot + 1].tolist())[-1]
        same = np.flatnonzero((self.context[:index] == np.uint64(context)) & (self.step[:index] == 0))
        return [int(one) for one in same if int(self.token[one]) != int(tokens[slot + 1])]

    def _by_content(self) -> dict[tuple[int, int], list[int]]:
        known: dict[tuple[int, int], list[int]] = {}
        for index in np.flatnonzero((self.step == 0) & (self.context != 0)).tolist():
            known.setdefault((int(self.context[index]), int(self.token[index])), []).append(index)
        return known

    def _cached_rows(self, index: int, known: dict[tuple[int, int], list[int]]) -> dict[int, int]:
        tokens = self.tokens_of[int(self.request[index])]
        count = int(self.cached[index])
        contexts = context_hashes(tokens[:count].tolist())
        rows: dict[int, int] = {}
        for slot, context in enumerate(contexts):
            follows = int(tokens[slot + 1]) if slot + 1 < len(tokens) else NONE
            earlier = [one for one in known.get((context, follows), ()) if one < index]
            if earlier:
                rows[slot] = earlier[-1]
        return rows


def timeline(trace: Trace, rank: Rank) -> Timeline:
    """Order the draft's rows of one rank."""
    return _Builder(trace, rank).build()


class _Builder:
    def __init__(self, trace: Trace, rank: Rank) -> None:
        self.rows, self.passes = rank.rows, rank.passes
        self.tokens = [trace.requests.tokens(r) for r in range(len(trace.requests))]
        self.contexts = [np.array(context_hashes(ids.tolist()), np.uint64) for ids in self.tokens]
        self.columns: dict[str, list[Any]] = {}
        self.count = 0
        self.states: dict[int, _State] = {}
        self.verified: dict[int, int] = {}
        self.starts = self._verify_starts()

    def _verify_starts(self) -> dict[int, list[tuple[int, int]]]:
        """Request -> (pass, first position) of its verify passes, in order."""
        starts: dict[int, list[tuple[int, int]]] = {}
        phase = self.passes["phase"][self.rows["pass"]] if len(self.rows["pass"]) else self.rows["pass"]
        verify = np.flatnonzero(phase == int(Phase.VERIFY))
        for index in verify.tolist():
            request, number = int(self.rows["request"][index]), int(self.rows["pass"][index])
            mine = starts.setdefault(request, [])
            if request >= 0 and (not mine or mine[-1][0] != number):
                mine.append((number, int(self.rows["position"][index])))
        return starts

    def build(self) -> Timeline:
        number, request = self.rows["pass"], self.rows["request"]
        cuts = np.flatnonzero((np.diff(number) != 0) | (np.diff(request) != 0)) + 1
        for low, high in zip([0, *cuts.tolist()], [*cuts.tolist(), len(number)], strict=True):
            if high > low and request[low] >= 0:
                self._block(low, high)
        if not self.columns:
            self._add({name: [] for name in Timeline.__dataclass_fields__ if name not in _NOT_COLUMNS})
        columns = {
            name: np.array(values, _DTYPES.get(name, np.int64)) for name, values in self.columns.items()
        }
        return Timeline(**columns, tokens_of=self.tokens, verified=self.verified)

    def _block(self, low: int, high: int) -> None:
        number, request = int(self.rows["pass"][low]), int(self.rows["request"][low])
        phase, model = int(self.passes["phase"][number]), int(self.passes["model"][number])
        state = self.states.setdefault(request, _State())
        if model == int(Model.TARGET):
            self._target(state, phase, low, high)
        elif phase == int(Phase.DRAFT_DECODE):
            self._step(state, low, high, number, request)
        else:
            self._extend(state, phase, low, high, number, request)

    def _target(self, state: _State, phase: int, low: int, high: int) -> None:
        state.positions = self.rows["position"][low:high].astype(np.int64)
        state.accepted = NONE
        if phase != int(Phase.VERIFY):
            return
        status = self.rows["status"][low:high]
        if not (status == int(RowStatus.UNKNOWN)).any():
            state.accepted = int((status == int(RowStatus.ACCEPTED)).sum())
        # Row k of a verified chain is the token that the draft's row k-1 of the chain proposed.
        proposers = [state.selected, *state.chain]
        chain = np.diff(state.positions) == 1
        for k in range(1, high - low):
            if not chain[:k].all() or k > len(proposers) or proposers[k - 1] < 0:
                break
            self.verified[proposers[k - 1]] = int(self.rows["token"][low + k])

    def _extend(self, state: _State, phase: int, low: int, high: int, number: int, request: int) -> None:
        size, first = high - low, self.count
        known = len(state.positions) == size
        slots = state.positions if known else self.rows["position"][low:high].astype(np.int64)
        if state.before == NONE and size:
            state.before = int(slots[0])
        state.chain, state.block = [], (first, first + size)
        accepted, state.selected = size, NONE
        if phase == int(Phase.PREFILL):
            state.selected = first + size - 1
        else:
            begins = [start for at, start in self.starts.get(request, ()) if at > number]
            accepted = state.accepted if not begins else begins[0] - int(slots[0])
            if 0 < accepted <= size:
                state.selected = first + accepted - 1
        self._add_rows(low, high, number, request, slots, state, committed=max(accepted, 0))

    def _step(self, state: _State, low: int, high: int, number: int, request: int) -> None:
        proposer = state.chain[-1] if state.chain else state.selected
        slot = NONE
        if high - low == 1 and proposer >= 0:
            slot = int(self.columns["slot"][proposer]) + 1
            state.chain.append(self.count)
        else:
            proposer, state.selected = NONE, NONE
        slots = np.full(high - low, slot, np.int64)
        self._add_rows(low, high, number, request, slots, state, after=proposer, step=len(state.chain) or 1)

    def _add_rows(
        self,
        low: int,
        high: int,
        number: int,
        request: int,
        slots: Ints,
        state: _State,
        *,
        committed: int = 0,
        after: int = NONE,
        step: int = 0,
    ) -> None:
        size, tokens, contexts = high - low, self.tokens[request], self.contexts[request]
        inside = [committed > k and 0 <= slot < len(tokens) for k, slot in enumerate(slots.tolist())]
        follows = [
            int(tokens[s + 1]) if ok and s + 1 < len(tokens) else NONE
            for ok, s in zip(inside, slots, strict=True)
        ]
        self._add(
            {
                "row": list(range(low, high)),
                "number": [number] * size,
                "phase": [int(self.passes["phase"][number])] * size,
                "request": [request] * size,
                "token": self.rows["token"][low:high].tolist(),
                "position": self.rows["position"][low:high].tolist(),
                "slot": slots.tolist(),
                "step": [step] * size,
                "after": [after] * size,
                "first": [self.count] * size,
                "last": [self.count + size] * size,
                "cached": [max(state.before, 0)] * size,
                "expected": follows,
                "committed": inside,
                "context": [int(contexts[s]) if ok else 0 for ok, s in zip(inside, slots, strict=True)],
            }
        )
        self.count += size

    def _add(self, columns: dict[str, list[Any]]) -> None:
        for name, values in columns.items():
            self.columns.setdefault(name, []).extend(values)


_DTYPES: dict[str, Any] = {"committed": np.bool_, "context": np.uint64}
_NOT_COLUMNS = ("tokens_of", "verified")
