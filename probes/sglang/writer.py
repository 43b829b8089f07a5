"""The process that writes a rank's spool, from memory that it shares with the server's process.

It is no child of the server, so that what ends the server's processes does not end it, too: when the server
has died it writes what is complete and ends by itself. Standard library only.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hsprobe.errors import HsprobeError
from hsprobe.probes.sglang.shared import (
    REASON_SIZE,
    RETURNED,
    RUNNING,
    WRITER,
    Entry,
    Life,
    Piece,
    Record,
    Shared,
)
from hsprobe.trace.spool import SpoolWriter, frame_of

ALIGNMENT = 64
"""Of bytes in the ring."""
IDLE_SECONDS = 0.15
STUCK_SECONDS = 5.0
"""A server is at rest when nothing came for so long: without requests, and with such as do not go on."""
TICK_SECONDS = 0.01
REST_SECONDS = 0.1
"""How often the writer looks for work: while there is some, and when there was none for a second."""
MUCH_SHARE = 8
"""With so large a part of the ring waiting it looks again at once."""
BATCH_BYTES = 16 << 20
BATCH_ENTRIES = 1024
NONE, SOME, MORE = 0, 1, 2


@dataclass
class Blocks:
    """Passes read from CUDA graphs, gathered into one record."""

    passes: list[dict[str, Any]] = field(default_factory=list)
    spans: list[list[int]] = field(default_factory=list)
    size: int = 0

    def add(self, header: dict[str, Any], pieces: tuple[Piece, ...]) -> None:
        """Add a pass."""
        self.passes.append({**header, "pieces": [[self._place(*piece), piece[1]] for piece in pieces]})

    def _place(self, offset: int, size: int) -> int:
        """Where in the payload the piece begins. Neighbours in the ring are written as one span."""
        if self.spans:
            end = self.spans[-1][1]
            start = -(-end // ALIGNMENT) * ALIGNMENT
            if offset == start:
                self.spans[-1][1] = offset + size
                place = self.size + start - end
                self.size = place + size
                return place
        self.spans.append([offset, offset + size])
        place, self.size = self.size, self.size + size
        return place


Frames = list[list[memoryview]]


class Writer:
    """Writes what a server publishes, in order. A failing disk, or `max_bytes`, ends the writing.

    Checksums are made while another thread writes what was ready before.

    Args:
        max_bytes: size of payloads at which it ends.
        server: the process that publishes.
    """

    def __init__(self, shared: Shared, spool: SpoolWriter, max_bytes: int, server: Life) -> None:
        self._shared = shared
        self._spool = spool
        self._max_bytes = max_bytes
        self._server = server
        self._position = 0
        self._written = 0
        self._blocks = Blocks()
        self._forms: dict[int, dict[str, Any]] = {}
        self._frames: Frames = []
        self._full: str | None = None
        self._queue: queue.Queue[tuple[Frames, int, int, str | None]] = queue.Queue(2)
        threading.Thread(target=self._write_frames, daemon=True).start()

    def run(self) -> None:
        """Write until the server has ended."""
        # Requests under way when it was last told; None while there is something to tell.
        told: int | None = 0
        since = time.monotonic()
        while True:
            dead = self._server.ended
            wrote = self.write_batch(dead)
            if wrote:
                told, since = None, time.monotonic()
                if wrote == MORE or self._much():
                    continue
            elif dead:
                self.settle()
                return
            quiet = time.monotonic() - since
            running = int(self._shared.words[RUNNING])
            rest = STUCK_SECONDS if running else IDLE_SECONDS
            if told != running and (told is None or not running) and quiet > rest and self._shared.at_rest:
                idle = ("idle", {"running": running}, ())
                self._queue.put((self._prepared([idle]), self._position, -1, None))
                told = running
            time.sleep(TICK_SECONDS if quiet < 1 else REST_SECONDS)

    def _much(self) -> bool:
        found = self._shared.read(self._position)
        used = found[0][1] - self._shared.words[RETURNED] if found else 0
        return used * MUCH_SHARE > self._shared.capacity

    def write_batch(self, dead: bool) -> int:
        """Write the next entries whose bytes are in place: NONE, SOME of them, or there may be MORE.

        Of a dead server, those that are not in place never will be, and are passed over.
        """
        entries: list[Entry] = []
        position, mark, size = self._position, -1, 0
        while len(entries) < BATCH_ENTRIES and size < BATCH_BYTES:
            found = self._shared.read(position)
            if found is None:
                break
            entry, after = found
            if self._shared.is_done(entry):
                entries.append(entry)
                size += sum(piece[1] for record in entry[2] for piece in record[2])
            elif not dead:
                break
            position, mark = after, max(mark, entry[1])
        if position == self._position:
            return NONE
        frames = self._prepared([record for entry in entries for record in entry[2]])
        self._queue.put((frames, position, mark, self._full))
        self._position = position
        return MORE if len(entries) == BATCH_ENTRIES or size >= BATCH_BYTES else SOME

    def settle(self) -> None:
        """Wait until all that was taken is written."""
        self._queue.join()

    def _prepared(self, records: list[Record]) -> Frames:
        self._frames = []
        if not self._shared.words[REASON_SIZE]:
            try:
                for record in records:
                    self._add(*record)
                self._end_blocks()
            except Exception as error:
                self._shared.stop(f"a record was not understood: {type(error).__name__}: {error}")
        return self._frames

    def _write_frames(self) -> None:
        """In a thread of its own: writing takes as long as making checksums."""
        while True:
            frames, position, mark, full = self._queue.get()
            if not self._shared.words[REASON_SIZE]:
                try:
                    for frame in frames:
                        self._spool.append_frame(frame)
                    self._spool.flush()
                except Exception as error:
                    self._shared.stop(f"writing the spool failed: {error}")
                if full is not None and not self._shared.words[REASON_SIZE]:
                    self._shared.stop(full)
            self._shared.release(position, mark)
            self._queue.task_done()

    def _add(self, kind: str, header: Any, pieces: tuple[Piece, ...]) -> None:
        if kind == "form":
            self._forms[header.pop("form")] = header
        elif kind == "block":
            form, number, nth, when, *second = header
            whole = {**self._forms[form], "pass": number, "nth": nth, "time": when}
            if second:
                whole["second"] = second[0]
            self._blocks.add(whole, pieces)
        else:
            self._end_blocks()
            self._write(kind, header, [self._bytes(*piece) for piece in pieces])

    def _end_blocks(self) -> None:
        blocks, self._blocks = self._blocks, Blocks()
        if blocks.passes:
            payload = [self._bytes(first, end - first) for first, end in blocks.spans]
            # Spans of the ring that lie side by side hold the padding between their pieces as well.
            self._write("blocks", {"pass": blocks.passes[0]["pass"], "passes": blocks.passes}, payload)

    def _bytes(self, offset: int, size: int) -> memoryview:
        return self._shared.ring[offset : offset + size]

    def _write(self, kind: str, header: dict[str, Any], payload: list[memoryview]) -> None:
        if self._full is not None:
            return
        self._written += sum(len(part) for part in payload)
        if self._written > self._max_bytes:
            self._full = f"the spool reached its limit of {self._max_bytes} bytes (HSPROBE_MAX_BYTES)"
            kind, header, payload = (
                "gap",
                {"pass": header.get("pass"), "site": None, "reason": self._full},
                [],
            )
        self._frames.append(frame_of(kind, header, payload))


def write(descriptor: int, journal: int, capacity: int, max_bytes: int, server: int, path: Path) -> int:
    """Be the writer of a server's process; returns when that has ended."""
    life = Life(server)
    # The server need not wait for this process, and no list of its children names it.
    if os.fork():
        os._exit(0)
    # A person's Ctrl-C is meant for the server.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    shared = Shared(descriptor, journal, capacity)
    shared.words[WRITER] = os.getpid()
    try:
        spool = SpoolWriter(path)
    except (HsprobeError, OSError) as error:
        shared.stop(f"the spool cannot be written: {error}")
        return 1
    Writer(shared, spool, max_bytes, life).run()
    # The spool is not closed before: who waits for its end also waits for this process's.
    os._exit(0)


def note(path: Path, reason: str) -> int:
    """Write down, in place of a writer that has died, why its spool ends."""
    with SpoolWriter(path) as spool:
        spool.append("gap", {"pass": None, "site": None, "reason": reason})
        spool.append("idle", {})
    return 0


def main(arguments: list[str]) -> int:
    """``write`` with its six arguments, or ``note`` with its two."""
    if arguments[0] == "note":
        return note(Path(arguments[1]), arguments[2])
    *numbers, path = arguments[1:]
    descriptor, journal, capacity, max_bytes, server = map(int, numbers)
    return write(descriptor, journal, capacity, max_bytes, server, Path(path))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
