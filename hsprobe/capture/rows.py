"""Says what every row of a forward pass is: whose token, in which context, accepted or not.

A server knows the fate of a drafted token only after the pass that verified it, so labels are made later,
from the passes themselves and from the token ids that the client received.

Letters: T rows of a pass, padding included.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from hsprobe.trace.context import START, context_hashes, extend
from hsprobe.trace.schema import (
    HEALTH_CHECK_PREFIX,
    NO_CONTEXT,
    NO_REQUEST,
    CaptureMode,
    Model,
    Phase,
    RowStatus,
)

Ints = npt.NDArray[np.int64]
MAX_PADDING = 1 << 20
"""More rows of padding than this in one pass are a damaged record."""


@dataclass(frozen=True)
class RequestTokens:
    """What a client knows of a request; `prompt_ids` is None when it sent text."""

    prompt_ids: Sequence[int] | None
    output_ids: Sequence[int]


@dataclass(frozen=True)
class Block:
    """The rows of one request in one pass; they lie side by side from row `first` on."""

    rid: str
    first: int
    positions: list[int]
    tokens: list[int]

    @property
    def start(self) -> int:
        """Position of the first row."""
        return self.positions[0]

    @cached_property
    def is_chain(self) -> bool:
        """Whether every row follows the one before; a draft tree has rows beside each other."""
        return self.positions == list(range(self.start, self.start + len(self.positions)))


@dataclass(frozen=True)
class PassRows:
    """One forward pass as its probe recorded it.

    Attributes:
        graph: replayed from a CUDA graph.
        number: counts the forwards of its process.
        nth: counts those of its model alone; equal on ranks that ran the same ones.
        tokens, positions: [T] int64; -1 in rows of padding that SGLang added in the forward itself.
        rids, req_rows: the requests in batch order and how many rows each has; rows beyond them are padding.
    """

    number: int
    nth: int
    model: Model
    phase: Phase
    mode: CaptureMode
    time: float
    rids: tuple[str, ...]
    req_rows: tuple[int, ...]
    tokens: Ints
    positions: Ints
    graph: bool = False

    @classmethod
    def parse(cls, header: Mapping[str, Any], payload: bytes) -> PassRows:
        """Read a "pass" record.

        Raises:
            ValueError, KeyError, TypeError: it is malformed.
        """
        n_rows = int(header["n_rows"])
        rids = tuple(str(rid) for rid in header["rids"])
        req_rows = tuple(int(rows) for rows in header["req_rows"])
        if len(rids) != len(req_rows) or min(req_rows, default=0) < 0 or sum(req_rows) > n_rows:
            raise ValueError(f"{len(rids)} requests with {sum(req_rows)} rows in a pass of {n_rows}")
        if len(payload) != 2 * 8 * n_rows:
            raise ValueError(f"{len(payload)} bytes of token ids and positions for {n_rows} rows")
        tokens, positions = np.frombuffer(payload, "<i8").reshape(2, n_rows)
        number = int(header["pass"])
        return cls(
            number=number,
            nth=int(header.get("nth", number)),
            model=Model[str(header["model"]).upper()],
            phase=Phase[str(header["phase"]).upper()],
            mode=CaptureMode[str(header["mode"]).upper()],
            time=float(header["time"]),
            rids=rids,
            req_rows=req_rows,
            tokens=tokens,
            positions=positions,
            graph=header.get("graph") is True,
        )

    def padded(self, rows: int) -> PassRows:
        """This pass with so many rows of padding after its own.

        Raises:
            ValueError: there cannot be so many.
        """
        if not 0 <= rows <= MAX_PADDING:
            raise ValueError(f"{rows} rows of padding")
        nobody = np.full(rows, -1, np.int64)
        return replace(
            self,
            tokens=np.concatenate([self.tokens, nobody]),
            positions=np.concatenate([self.positions, nobody]),
        )

    def blocks(self) -> Iterator[Block]:
        """The rows of each request that has any."""
        first = 0
        for rid, rows in zip(self.rids, self.req_rows, strict=True):
            if rows:
                span = slice(first, first + rows)
                yield Block(rid, first, self.positions[span].tolist(), self.tokens[span].tolist())
            first += rows

    def kept(self) -> npt.NDArray[np.bool_]:
        """[T] mask: all but the rows of the server's health checks; none where it has no other request."""
        mask = np.ones(len(self.tokens), np.bool_)
        checks = [rid.startswith(HEALTH_CHECK_PREFIX) for rid in self.rids]
        if checks and all(checks):
            mask[:] = False
        mask[: sum(self.req_rows)] &= ~np.repeat(np.array(checks, np.bool_), self.req_rows)
        return mask

    def last_rows(self) -> Ints:
        """The last row of each request that has any."""
        rows = np.array(self.req_rows, np.int64)
        return np.cumsum(rows)[rows > 0] - 1


@dataclass
class RequestLog:
    """Token ids of a request as the passes of one rank show them, one pass after the other.

    Attributes:
        ids: known from position 0 on without a hole.
        prompt_len: how many of them were the prompt.
        contradicted: two passes, or the prompt and a pass, put different tokens at one position.
        holed: a pass began beyond what is known.
    """

    ids: list[int] = field(default_factory=list)
    prompt_len: int = 0
    contradicted: bool = False
    holed: bool = False
    _prompt_known: bool = False
    _drafted: Block | None = None

    def set_prompt(self, ids: Sequence[int]) -> None:
        """The prompt as the server holds it."""
        self._commit(0, list(ids))
        self.prompt_len = len(ids)
        self._prompt_known = True

    def set_answer(self, ids: Sequence[int]) -> None:
        """What was generated for the request, as the server held it when it had ended."""
        self._commit(self.prompt_len, list(ids))

    def see(self, phase: Phase, block: Block) -> None:
        """A pass of the target over tokens of this request."""
        if block.start < 0:
            return
        self._settle(block.start)
        if phase == Phase.VERIFY:
            # The first row is the token the target itself chose last time; the rest are guesses.
            self._commit(block.start, block.tokens[:1])
            self._drafted = block if block.is_chain else None
        elif block.is_chain:
            self._commit(block.start, block.tokens)
        if phase != Phase.PREFILL:
            self._prompt_known = True
        elif not self._prompt_known:
            self.prompt_len = len(self.ids)

    def _settle(self, start: int) -> None:
        """A pass that goes on at `start` shows that the drafted tokens before it were accepted."""
        drafted, self._drafted = self._drafted, None
        if drafted is not None and drafted.start < start <= drafted.start + len(drafted.tokens):
            self._commit(drafted.start, drafted.tokens[: start - drafted.start])

    def _commit(self, start: int, tokens: list[int]) -> None:
        known = self.ids[start : start + len(tokens)]
        self.contradicted |= known != tokens[: len(known)]
        if start <= len(self.ids):
            self.ids.extend(tokens[len(known) :])
        else:
            self.holed = True


@dataclass(frozen=True)
class KnownRequest:
    """A request as far as everything together tells.

    Attributes:
        ids: every token id known to have been run or received, from position 0 on.
        prompt_len: how many of them were the prompt.
        final_len: how many belong to the request; a server runs a little past the end of one.
        usable: whether `ids` can be trusted.
        note: what did not agree.
    """

    ids: list[int]
    prompt_len: int
    final_len: int
    usable: bool = True
    note: str | None = None

    @cached_property
    def contexts(self) -> list[int]:
        """Context of each of `ids`."""
        return context_hashes(self.ids)


def settle_request(logs: Sequence[RequestLog], client: RequestTokens | None) -> KnownRequest:
    """Put together what each rank saw of a request and what the client received."""
    best = max(logs, key=lambda log: len(log.ids), default=RequestLog())
    seen, prompt_len = best.ids, min(best.prompt_len, len(best.ids))
    if any(log.contradicted for log in logs):
        note = "its passes contradict each other, so its rows have no context"
        return KnownRequest(seen, prompt_len, len(seen), usable=False, note=note)
    if client is None or (client.prompt_ids is None and (best.holed or not prompt_len)):
        return KnownRequest(seen, prompt_len, len(seen))
    prompt = list(seen[:prompt_len] if client.prompt_ids is None else client.prompt_ids)
    received = prompt + list(client.output_ids)
    common = min(len(received), len(seen))
    if received[:common] != seen[:common]:
        differ = next(i for i in range(common) if received[i] != seen[i])
        note = f"the client's token ids differ from those the server ran from position {differ} on"
        return KnownRequest(seen, prompt_len, len(seen), note=note)
    return KnownRequest(received + seen[common:], len(prompt), len(received))


@dataclass
class Labels:
    """[T] columns of the rows of one pass, as in `schema.ROW_COLUMNS`."""

    request: Ints
    context: npt.NDArray[np.uint64]
    status: npt.NDArray[np.uint8]


class Labeller:
    """Labels the passes of one rank, given in the order in which they ran.

    Args:
        known: every request by id.
        index: request id -> index in the trace; requests that are not there get `NO_REQUEST`.
    """

    def __init__(self, known: Mapping[str, KnownRequest], index: Mapping[str, int]) -> None:
        self._known = known
        self._index = index
        self._verified: dict[str, tuple[list[int], list[int], list[int]]] = {}

    def label(self, one: PassRows) -> Labels:
        """Labels of every row of the next pass, padding included."""
        n_rows = len(one.tokens)
        labels = Labels(
            np.full(n_rows, NO_REQUEST, np.int64),
            np.full(n_rows, NO_CONTEXT, np.uint64),
            np.full(n_rows, RowStatus.PADDING, np.uint8),
        )
        for block in one.blocks():
            if block.rid not in self._index:
                continue
            contexts, statuses = self._block(one, block, self._known[block.rid])
            span = slice(block.first, block.first + len(block.tokens))
            labels.request[span] = self._index[block.rid]
            labels.context[span] = contexts
            labels.status[span] = statuses
        return labels

    def _block(self, one: PassRows, block: Block, known: KnownRequest) -> tuple[list[int], list[int]]:
        if one.model == Model.DRAFT:
            return self._draft(one.phase, block, known)
        if one.phase != Phase.VERIFY:
            return _contexts(block, known), [RowStatus.PLAIN] * len(block.tokens)
        labels = _contexts(block, known), _fates(block, known)
        self._verified[block.rid] = block.positions, *labels
        return labels

    def _draft(self, phase: Phase, block: Block, known: KnownRequest) -> tuple[list[int], list[int]]:
        contexts = [NO_CONTEXT] * len(block.tokens)
        statuses: list[int] = [RowStatus.UNKNOWN] * len(block.tokens)
        if phase == Phase.PREFILL:
            if known.usable:
                inside = range(len(known.ids))
                contexts = [known.contexts[p] if p in inside else NO_CONTEXT for p in block.positions]
            statuses = [RowStatus.PLAIN] * len(block.tokens)
        elif phase == Phase.DRAFT_EXTEND and block.rid in self._verified:
            # Row k of the draft's block takes the hidden state of row k of the verified block.
            rows = enumerate(zip(block.positions, *self._verified[block.rid], strict=False))
            for k, (position, verified_position, context, status) in rows:
                if position == verified_position:
                    contexts[k], statuses[k] = context, status
        return contexts, statuses


def _contexts(block: Block, known: KnownRequest) -> list[int]:
    """Contexts of target rows: what is committed before the block, then the block's own tokens."""
    start, n = block.start, len(block.tokens)
    if not known.usable or not 0 <= start <= len(known.ids):
        return [NO_CONTEXT] * n
    before = known.contexts[start - 1] if start else START
    if not block.is_chain:
        # Which rows a row of a draft tree follows is not recorded; only the root's prefix is certain.
        return extend(before, block.tokens[:1]) + [NO_CONTEXT] * (n - 1)
    if block.tokens == known.ids[start : start + n]:
        return known.contexts[start : start + n]
    return extend(before, block.tokens)


def _fates(block: Block, known: KnownRequest) -> list[int]:
    """Status of each row of a verify block."""
    statuses: list[int] = [RowStatus.UNKNOWN] * len(block.tokens)
    if not known.usable or block.start < 0:
        return statuses
    certain = block.tokens if block.is_chain else block.tokens[:1]
    final_ids = known.ids[block.start : known.final_len]
    for k, (token, final) in enumerate(zip(certain, final_ids, strict=False)):
        if token != final:
            statuses[k:] = [RowStatus.REJECTED] * (len(statuses) - k)
            break
        statuses[k] = RowStatus.ACCEPTED
    return statuses
