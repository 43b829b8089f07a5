"""Memory that a server's process and the process that writes its spool share: a journal, and a ring.

The journal holds records in order, without their bytes; the ring holds the bytes. One process appends and
takes space, the other reads and returns it, and the device itself notes how far its copies have come. So the
server makes no call for the writing of a record, and neither ever waits for the other. Standard library only:
the writer starts in a fresh interpreter.
"""

from __future__ import annotations

import marshal
import mmap
import os
import zlib
from pathlib import Path
from struct import Struct
from typing import Any

PAGE = 4096
_WORD = 8
_FRAME = Struct("=II")
_SKIP = (1 << 32) - 1
_REASON = 1024

# Numbers of 64 bits in the first page, those of one side in cache lines of their own.
HEAD, RUNNING = 0, 1
"""The server's: bytes of the journal that it has published since the beginning, and requests that have begun
and not ended."""
TAIL, RETURNED, REASON_SIZE, WRITER = 8, 9, 10, 11
"""The writer's: bytes of the journal that it is done with, the ring's mark up to there, how long the reason
is for which it stopped writing (0: it has not), its process id (0: it is starting)."""
DONE, STREAMS = 16, 16
"""The device's, one for each stream: the last ticket whose copies are in place."""

Piece = tuple[int, int]
"""Offset and size of bytes in the ring."""
Record = tuple[str, Any, tuple[Piece, ...]]
"""Kind, header and bytes."""
Tickets = tuple[tuple[int, int], ...]
"""Numbers of streams, and what each of them has to note before the bytes are in place."""
Entry = tuple[Tickets, int, list[Record]]
"""Records handed over together; the number in the middle is the ring's mark behind their bytes, or -1."""


class Shared:
    """The memory, mapped into this process.

    Args:
        descriptor: of the memory. journal, capacity: bytes of the journal and of the ring.

    Attributes:
        map: all of it. words: the numbers. ring: the ring's bytes. ring_offset: where they begin.
    """

    def __init__(self, descriptor: int, journal: int, capacity: int) -> None:
        self.descriptor = descriptor
        self.journal = journal
        self.capacity = capacity
        self.ring_offset = PAGE + journal
        self.size = -(-(self.ring_offset + capacity) // PAGE) * PAGE
        self.map = mmap.mmap(descriptor, self.size)
        view = memoryview(self.map)
        self.words = view[:_REASON].cast("Q")
        self.ring = view[self.ring_offset : self.ring_offset + capacity]
        self._entries = view[PAGE : PAGE + journal]
        self._reason = view[_REASON:PAGE]

    @classmethod
    def create(cls, journal: int, capacity: int) -> Shared:
        """New memory, which ends with the last process that has it."""
        descriptor = os.memfd_create("hsprobe", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, -(-(PAGE + journal + capacity) // PAGE) * PAGE)
        return cls(descriptor, journal, capacity)

    # The server's side

    def append(self, entry: Entry) -> bool:
        """Publish an entry; whether there was room. One thread at a time.

        Raises:
            ValueError: it holds what cannot be written down, or is larger than half of the journal.
        """
        data = marshal.dumps(entry)
        size = -(-(_FRAME.size + len(data)) // _WORD) * _WORD
        if size * 2 > self.journal:
            raise ValueError(f"a record of {len(data)} bytes is more than can be handed over")
        words, start = self.words, self.words[HEAD]
        at = start % self.journal
        skipped = self.journal - at if at + size > self.journal else 0
        if start + skipped + size - words[TAIL] > self.journal:
            return False
        if skipped:
            _FRAME.pack_into(self._entries, at, _SKIP, 0)
            at = 0
        self._entries[at + _FRAME.size : at + _FRAME.size + len(data)] = data
        _FRAME.pack_into(self._entries, at, len(data), zlib.crc32(data))
        words[HEAD] = start + skipped + size
        return True

    @property
    def stopped(self) -> str | None:
        """Why the writer writes nothing any more."""
        size = self.words[REASON_SIZE]
        return bytes(self._reason[:size]).decode("utf-8", "replace") if size else None

    @property
    def at_rest(self) -> bool:
        """Whether the writer is done with all that was published."""
        return self.words[TAIL] == self.words[HEAD]

    # The writer's side

    def read(self, position: int) -> tuple[Entry, int] | None:
        """The entry at a position of the journal and the position behind it; None where there is none yet."""
        while position < self.words[HEAD]:
            at = position % self.journal
            size, checksum = _FRAME.unpack_from(self._entries, at)
            if size == _SKIP:
                position += self.journal - at
                continue
            data = bytes(self._entries[at + _FRAME.size : at + _FRAME.size + size])
            if zlib.crc32(data) != checksum:
                # A processor that shows one core's writes to another in another order: not all there yet.
                return None
            return marshal.loads(data), position + -(-(_FRAME.size + size) // _WORD) * _WORD
        return None

    def is_done(self, entry: Entry) -> bool:
        """Whether the bytes of its records are in place."""
        return all(self.words[DONE + number] >= ticket for number, ticket in entry[0])

    def release(self, position: int, mark: int) -> None:
        """Give back the journal up to a position, and the ring up to a mark (-1: nothing of it)."""
        if mark >= 0:
            self.words[RETURNED] = mark
        self.words[TAIL] = position

    def stop(self, reason: str) -> None:
        """Say that nothing is written any more."""
        text = reason.encode()[: PAGE - _REASON]
        self._reason[: len(text)] = text
        self.words[REASON_SIZE] = len(text)


class Life:
    """Whether a process lives, as long as no other has taken its id.

    Args:
        pid: of a process that lives now.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._began = _state(pid)[1]

    @property
    def ended(self) -> bool:
        """A process that nobody has buried yet counts as ended."""
        state, began = _state(self.pid)
        return state in "ZX" or began != self._began


def _state(pid: int) -> tuple[str, str]:
    """State letter ("X" without such a process) and time of its start."""
    try:
        status = Path("/proc", str(pid), "stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return "X", ""
    # The name of the program, in parentheses, may itself hold parentheses and blanks.
    fields = status.rpartition(")")[2].split()
    return fields[0], fields[19]
