"""The thread that writes a rank's spool, and the copies of live tensors that it is handed.

A copy is enqueued on the stream that produced the tensor and the caller goes on: the next kernels
may overwrite the original, since SGLang's fused add+RMSNorm works in place.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hsprobe.probes.sglang.ring import ALIGNMENT, Ring
from hsprobe.trace.spool import SpoolWriter

logger = logging.getLogger("hsprobe")

IDLE_SECONDS = 0.06
REST_SECONDS = 1.0
SHORT_SECONDS = 0.005
TICK_SECONDS = 0.1
"""The writer looks for work this often, or when there is much of it: each time it runs, the server's own
thread is held up for a moment, as Python runs one of them at a time."""
MUCH_SHARE = 8
"""The writer is woken once this part of the ring is full."""
BATCH_BYTES = 16 << 20
BATCH_RECORDS = 1024


class Copy:
    """A tensor's bytes as they were when the copy was asked for, in memory of its own.

    Args:
        tensor: any shape and dtype, on the CPU or a CUDA device.

    Attributes:
        dtype: torch's name of the dtype, e.g. ``"bfloat16"``.
        shape: the tensor's shape.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        tensor = tensor.detach()
        self.dtype = str(tensor.dtype).removeprefix("torch.")
        self.shape = list(tensor.shape)
        self._ready: Any = None
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._ready = torch.cuda.Event()
            self._ready.record()
        else:
            self._host = tensor.clone(memory_format=torch.contiguous_format)

    def bytes(self) -> memoryview:
        """The bytes in C order; waits for the device when the copy is still under way."""
        if self._ready is not None:
            self._ready.synchronize()
        return self._host.reshape(-1).view(torch.uint8).numpy().data


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes in the ring."""

    offset: int
    size: int


Part = Copy | Piece
Entry = tuple[str, dict[str, Any], Sequence[Part]]


@dataclass(slots=True)
class Job:
    """Records whose bytes are in place once `event` has come to pass.

    Attributes:
        mark: how far the ring may be taken back when they are written; None without bytes in it.
    """

    records: list[Entry]
    event: Any = None
    mark: int | None = None


@dataclass
class _Blocks:
    """Passes read from CUDA graphs, gathered into one record."""

    passes: list[dict[str, Any]] = field(default_factory=list)
    spans: list[list[int]] = field(default_factory=list)
    size: int = 0

    def add(self, header: dict[str, Any], pieces: Sequence[Part]) -> None:
        places = []
        for piece in pieces:
            assert isinstance(piece, Piece)
            places.append([self._place(piece), piece.size])
        self.passes.append({**header, "pieces": places})

    def _place(self, piece: Piece) -> int:
        """Where in the payload the piece begins. Neighbours in the ring are written as one span."""
        if self.spans:
            end = self.spans[-1][1]
            start = -(-end // ALIGNMENT) * ALIGNMENT
            if piece.offset == start:
                self.spans[-1][1] = piece.offset + piece.size
                place = self.size + start - end
                self.size = place + piece.size
                return place
        self.spans.append([piece.offset, piece.offset + piece.size])
        place, self.size = self.size, self.size + piece.size
        return place


class Spooler:
    """Writes records in the order they are given, from a thread of its own.

    A failing disk, or ``max_bytes``, ends the recording, never the server.

    Args:
        path: the spool.
        max_bytes: size of payloads at which recording stops.
        ring: where `Piece`s lie; None where none are given.

    Attributes:
        stopped: why nothing is written any more.
        on_idle: called in the writer's thread whenever it has nothing to write; what it puts is written.
        events: CUDA events that are done with.
    """

    def __init__(self, path: Path, max_bytes: int, ring: Ring | None = None) -> None:
        self.path = path
        self.stopped: str | None = None
        self.on_idle: Callable[[], None] | None = None
        self.events: list[Any] = []
        self._writer = SpoolWriter(path)
        self._max_bytes = max_bytes
        self._ring = ring
        self._written = 0
        self._jobs: deque[Job] = deque()
        self._asleep = False
        self._idle = False
        self._wake = threading.Event()
        threading.Thread(target=self._run, name="hsprobe-spool", daemon=True).start()

    def put(self, kind: str, header: dict[str, Any], copies: Sequence[Copy] = ()) -> None:
        """Queue one record."""
        self.submit(Job([(kind, header, copies)]))

    def submit(self, job: Job) -> None:
        """Queue records whose bytes may lie in the ring."""
        if self.stopped is None:
            self._jobs.append(job)
            if self._asleep and (self._idle or self._much()):
                self._asleep = False
                self._wake.set()

    def _run(self) -> None:
        told_idle, quiet_since = True, time.monotonic()
        while True:
            jobs = self._ready()
            if jobs:
                self._write_all(jobs)
                told_idle, quiet_since = False, time.monotonic()
                # Not at once again, though a pass or two may be ready: see TICK_SECONDS.
                if not self._much():
                    self._sleep(TICK_SECONDS)
                continue
            if self._jobs or (not told_idle and time.monotonic() - quiet_since < IDLE_SECONDS):
                self._sleep(SHORT_SECONDS if self._much() or not self._jobs else TICK_SECONDS)
                continue
            if self.on_idle is not None:
                self.on_idle()
            if self._jobs:
                continue
            if not told_idle:
                self._write_all([Job([("idle", {}, ())])])
                told_idle = True
            self._idle = True
            if not self._jobs:
                self._sleep(IDLE_SECONDS if self.on_idle is not None else REST_SECONDS)
            self._idle = False

    def _sleep(self, seconds: float) -> None:
        self._wake.clear()
        self._asleep = True
        self._wake.wait(seconds)
        self._asleep = False

    def _much(self) -> bool:
        return self._ring is not None and self._ring.used * MUCH_SHARE > self._ring.capacity

    def _ready(self) -> list[Job]:
        """The next jobs whose bytes are in place, up to a bounded amount."""
        jobs: list[Job] = []
        size = 0
        while self._jobs and len(jobs) < BATCH_RECORDS and size < BATCH_BYTES:
            job = self._jobs[0]
            if job.event is not None and not job.event.query():
                break
            jobs.append(self._jobs.popleft())
            size += sum(part.size for record in job.records for part in record[2] if isinstance(part, Piece))
        return jobs

    def _write_all(self, jobs: Sequence[Job]) -> None:
        if self.stopped is None:
            try:
                self._write_records([record for job in jobs for record in job.records])
                self._writer.flush()
            except Exception as error:
                self.stopped = f"writing the spool failed: {error}"
            if self.stopped is not None:
                logger.error("hsprobe stopped recording in process %d: %s", os.getpid(), self.stopped)
        for job in jobs:
            if job.event is not None:
                self.events.append(job.event)
            if job.mark is not None and self._ring is not None:
                self._ring.release(job.mark)

    def _write_records(self, records: Sequence[Entry]) -> None:
        blocks = _Blocks()
        for kind, header, parts in records:
            if kind == "block":
                blocks.add(header, parts)
                continue
            self._write_blocks(blocks)
            blocks = _Blocks()
            self._write(kind, header, [self._bytes(part) for part in parts])
        self._write_blocks(blocks)

    def _write_blocks(self, blocks: _Blocks) -> None:
        if blocks.passes:
            payload = [self._bytes(Piece(first, end - first)) for first, end in blocks.spans]
            # Spans of the ring that lie side by side hold the padding between their pieces as well.
            self._write("blocks", {"pass": blocks.passes[0]["pass"], "passes": blocks.passes}, payload)

    def _bytes(self, part: Part) -> memoryview:
        if isinstance(part, Copy):
            return part.bytes()
        assert self._ring is not None
        return self._ring.view[part.offset : part.offset + part.size]

    def _write(self, kind: str, header: dict[str, Any], payload: list[memoryview]) -> None:
        if self.stopped is not None:
            return
        self._written += sum(len(part) for part in payload)
        if self._written > self._max_bytes:
            self.stopped = f"the spool reached its limit of {self._max_bytes} bytes (HSPROBE_MAX_BYTES)"
            self._writer.append("gap", {"pass": header.get("pass"), "site": None, "reason": self.stopped})
        else:
            self._writer.append(kind, header, payload)
