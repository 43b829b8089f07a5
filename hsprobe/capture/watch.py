"""Follows the spools of a running server: what is recorded so far, and how far it is from a dump.

Letters: T rows of a pass, n rows of a tensor, H width of a chunk.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from hsprobe.capture.rows import MAX_PADDING, Block, PassRows
from hsprobe.compare.direct import Lane
from hsprobe.compare.stack import Stack, stacks_of
from hsprobe.compare.statistics import ErrorStats, Floats, row_errors
from hsprobe.trace import schema
from hsprobe.trace.blocks import Expander
from hsprobe.trace.context import START, extend
from hsprobe.trace.place import owner_runs
from hsprobe.trace.reader import Trace
from hsprobe.trace.schema import HEALTH_CHECK_PREFIX, Model, Phase
from hsprobe.trace.spool import Record, SpoolReader

# A tensor follows its pass at once; passes further back need not be kept.
_PASSES_KEPT = 64


@dataclass
class Request:
    """What the passes of one rank show of a request: tokens so far, their contexts, its last verify block."""

    tokens: list[int] = field(default_factory=list)
    contexts: list[int] = field(default_factory=list)
    verify_start: int | None = None


@dataclass
class Site:
    """What one site gave: rows, and the errors of those that the training dump holds."""

    rows: int = 0
    errors: ErrorStats = field(default_factory=ErrorStats)


@dataclass
class Tally:
    """Everything so far, over all ranks.

    Attributes:
        passes, rows: by (model, phase) in words.
        blocks, committed: verify blocks whose fate is known, and the tokens that they committed.
        sites: by tensor name, chunks apart: `aux chunk 0`.
        gaps: reasons and how often. ended: whether every server process has said goodbye, or is gone.
    """

    passes: Counter[tuple[str, str]] = field(default_factory=Counter)
    rows: Counter[tuple[str, str]] = field(default_factory=Counter)
    requests: set[str] = field(default_factory=set)
    blocks: int = 0
    committed: int = 0
    sites: dict[str, Site] = field(default_factory=dict)
    gaps: Counter[str] = field(default_factory=Counter)
    size: int = 0
    spools: int = 0
    ended: bool = False

    @property
    def acceptance(self) -> float | None:
        """Tokens committed a verify block, None before the first."""
        return self.committed / self.blocks if self.blocks else None


class Reference:
    """The training dump: its chunks, and its depths if it has them, by the names of the served tensors."""

    def __init__(self, trace: Trace) -> None:
        self._stacks = stacks_of(trace, "train")
        self._scales: dict[tuple[str, int], Floats] = {}

    def errors(self, name: str, chunk: int, chunks: int, rows: Floats, contexts: np.ndarray) -> Floats | None:
        """Row errors of served rows [n, H] whose contexts the dump holds; None if it lacks the tensor."""
        stack: Stack | None = self._stacks.get(name)
        if stack is None or stack.width != chunks * rows.shape[1] or not len(stack.keys.usable):
            return None
        table, first = stack.keys.by_context
        at = np.minimum(np.searchsorted(table, contexts), len(table) - 1)
        hit = (table[at] == contexts) & (contexts != schema.NO_CONTEXT)
        lane = Lane(stack, rows.shape[1], chunk)
        if (name, chunk) not in self._scales:
            self._scales[name, chunk] = lane.scale()
        if not hit.any():
            return np.zeros(0, np.float32)
        return row_errors(rows[hit], lane.of(stack.read(first[at[hit]])), self._scales[name, chunk])


class Watch:
    """Reads what is new in a folder of spools each time it is asked.

    Args:
        folder: a server's spool folder.
        reference: what to compare with, None to count only.
    """

    def __init__(self, folder: Path, reference: Reference | None = None) -> None:
        self.folder = folder
        self.tally = Tally()
        self._reference = reference
        self._ranks: dict[Path, _Rank] = {}

    def read(self) -> Tally:
        """Take in what the server has written since the last time.

        Raises:
            HsprobeError: a file there is no spool.
        """
        paths = sorted(self.folder.glob("*.spool"))
        for path in paths:
            rank = self._ranks.setdefault(path, _Rank(SpoolReader(path), self.tally, self._reference))
            rank.read()
        self.tally.spools = len(paths)
        self.tally.size = sum(path.stat().st_size for path in paths)
        ended = [self._ranks[path].ended or not owner_runs(path) for path in paths]
        self.tally.ended = bool(ended) and all(ended)
        return self.tally


class _Rank:
    """One spool."""

    def __init__(self, reader: SpoolReader, tally: Tally, reference: Reference | None) -> None:
        self._reader, self._tally, self._reference = reader, tally, reference
        self._requests: dict[str, Request] = {}
        self._contexts: dict[int, np.ndarray] = {}
        self._expander = Expander()
        self.ended = False

    def read(self) -> None:
        for record in self._reader:
            self.ended = record.kind == "bye"
            try:
                for one in self._expander.expand(record):
                    self._take(one)
            except (ValueError, KeyError, TypeError, IndexError) as error:
                self._tally.gaps[f"a {record.kind} record cannot be read: {error}"] += 1

    def _take(self, record: Record) -> None:
        if record.kind == "pass":
            self._pass(PassRows.parse(record.header, bytes(record.payload)))
        elif record.kind == "tensor":
            self._tensor(record.header, bytes(record.payload))
        elif record.kind == "padding":
            number, rows = int(record.header["pass"]), min(int(record.header["rows"]), MAX_PADDING)
            more = np.full(rows, schema.NO_CONTEXT, np.uint64)
            self._contexts[number] = np.concatenate([self._contexts[number], more])
        elif record.kind == "gap":
            self._tally.gaps[str(record.header.get("reason", "no reason given"))] += 1
        elif record.kind == "missing":
            reason = f"passes not recorded: {record.header['reason']}"
            self._tally.gaps[reason] += int(record.header["passes"])

    def _pass(self, found: PassRows) -> None:
        kind = (found.model.name.lower(), found.phase.name.lower().replace("_", " "))
        self._tally.passes[kind] += 1
        self._tally.rows[kind] += int(found.kept().sum())
        contexts = np.full(len(found.tokens), schema.NO_CONTEXT, np.uint64)
        for block in found.blocks():
            if found.model is Model.TARGET and not block.rid.startswith(HEALTH_CHECK_PREFIX):
                self._tally.requests.add(block.rid)
                known = self._block(block, found.phase)
                contexts[block.first : block.first + len(known)] = known
        self._contexts[found.number] = contexts
        for number in [n for n in self._contexts if n <= found.number - _PASSES_KEPT]:
            del self._contexts[number]

    def _block(self, block: Block, phase: Phase) -> list[int]:
        """Note the tokens of a block; the contexts of its rows, or none where what came before is unknown."""
        request = self._requests.setdefault(block.rid, Request())
        if request.verify_start is not None:
            self._tally.blocks += 1
            self._tally.committed += block.start - request.verify_start
        request.verify_start = block.start if phase is Phase.VERIFY else None
        if not block.is_chain or block.start > len(request.tokens):
            return []
        # Tokens from here on were guesses that a later pass has corrected.
        del request.tokens[block.start :], request.contexts[block.start :]
        before = request.contexts[-1] if request.contexts else START
        known = extend(before, block.tokens)
        request.tokens += block.tokens
        request.contexts += known
        return known

    def _tensor(self, header: dict[str, Any], payload: bytes) -> None:
        name, shape = str(header["name"]), tuple(int(size) for size in header["shape"])
        chunks = int(header.get("chunks") or 1)
        contexts = self._contexts.get(int(header["pass"]))
        for chunk in range(chunks):
            label = f"{name} chunk {chunk}" if chunks > 1 else name
            self._tally.sites.setdefault(label, Site()).rows += shape[0]
        rows = header.get("rows")
        if self._reference is None or contexts is None or rows == "last" or shape[1] % chunks:
            return
        if isinstance(rows, dict):
            rows = range(int(rows["first"]), int(rows["first"]) + int(rows["count"]))
        chosen = contexts[: shape[0]] if rows is None else contexts[np.asarray(rows, np.int64)]
        values = _floats(payload, str(header["dtype"]), shape)
        width = shape[1] // chunks
        for chunk in range(chunks):
            label = f"{name} chunk {chunk}" if chunks > 1 else name
            mine = values[:, chunk * width : (chunk + 1) * width]
            errors = self._reference.errors(name, chunk, chunks, mine, chosen)
            if errors is not None and len(errors):
                self._tally.sites[label].errors.add(errors, np.inf)


def _floats(payload: bytes, dtype: str, shape: tuple[int, ...]) -> Floats:
    raw = np.frombuffer(payload, schema.STORAGE[dtype]).reshape(shape)
    if raw.dtype != np.float32 and hasattr(ml_dtypes, dtype):
        raw = raw.view(np.dtype(getattr(ml_dtypes, dtype)))
    with np.errstate(over="ignore", invalid="ignore"):
        found: Floats = raw.astype(np.float32, copy=False)
    return found
