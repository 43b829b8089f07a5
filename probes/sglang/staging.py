"""Takes copies of live tensors into the ring, in the server's own thread, without waiting for the device.

Letters: n rows of a tensor, W its width.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hsprobe.probes.sglang.device import Device
from hsprobe.probes.sglang.pressure import Ledger, Pressure
from hsprobe.probes.sglang.ring import Ring
from hsprobe.probes.sglang.sampling import Runs
from hsprobe.probes.sglang.shared import Entry, Piece, Record, Tickets
from hsprobe.probes.sglang.spooling import Spooler

PASSES = 24
"""As many passes are handed over at once: for the device to note that they are there takes a call, too."""
HELD_SHARE = 8
"""Records are handed over, though their pass is not at its end, once they hold this part of the ring."""


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes that are read together and become one piece.

    Attributes:
        spans: flat uint8 tensors that lie one after the other in the piece, and their addresses and sizes.
        size: of all of them.
    """

    spans: tuple[tuple[torch.Tensor, int, int], ...]
    size: int

    @classmethod
    def of(cls, spans: Sequence[torch.Tensor]) -> Part:
        """A part of these flat uint8 tensors."""
        found = tuple((span, span.data_ptr(), span.numel()) for span in spans)
        return cls(found, sum(size for _, _, size in found))


class Stage:
    """Collects the records of a pass and hands them to the writer together.

    Args:
        spooler: takes the records.
        pressure: what to do without room.
        device: copies from a GPU; None where tensors lie in host memory.

    Attributes:
        ring: where copies go.
        ledger: what is missing.
        lock: held while a pass is recorded, so that no other thread hands over one half of it.
    """

    def __init__(self, spooler: Spooler, pressure: Pressure, device: Device | None = None) -> None:
        self.spooler = spooler
        self.ring = Ring(spooler.shared)
        self.pressure = pressure
        self.device = device
        self.ledger = Ledger()
        self.lock = threading.Lock()
        self._records: list[Record] = []
        self._streams: list[int] = []
        self._since = 0
        self._passes = 0

    def add(self, kind: str, header: Any, pieces: Sequence[Piece] = ()) -> None:
        """A record whose bytes were copied by this stage."""
        self._records.append((kind, header, tuple(pieces)))
        if (self.ring.mark - self._since) * HELD_SHARE > self.ring.capacity:
            self.flush()

    def copy(self, tensor_nW: torch.Tensor, runs: Runs | None = None) -> Piece | None:
        """Copy rows, or all of a tensor of any shape, in C order; None without room.

        Args:
            runs: which rows, as [first, last) runs; None for all.
        """
        if self.device is not None and tensor_nW.is_cuda:
            stream = self.device.stream()
            if stream not in self._streams:
                self._streams.append(stream)
        rows = [(0, tensor_nW.shape[0])] if runs is None else [run for run in runs if run[0] < run[1]]
        row_size = tensor_nW[:1].numel() * tensor_nW.element_size()
        size = row_size * sum(last - first for first, last in rows)
        offset = self._room(size)
        if offset is None:
            return None
        at = offset
        for first, last in rows:
            part = tensor_nW if (first, last) == (0, tensor_nW.shape[0]) else tensor_nW[first:last]
            end = at + row_size * (last - first)
            target = self.ring.memory[at:end].view(part.dtype).view(part.shape)
            target.copy_(part.detach(), non_blocking=True)
            at = end
        return offset, size

    def read(self, parts: Sequence[Part], stream: int | None) -> list[Piece] | None:
        """Copy parts, from the device on a stream of it; None without room for all of them."""
        device = None if stream is None else self.device
        if stream is not None and stream not in self._streams:
            self._streams.append(stream)
        pieces: list[Piece] = []
        for part in parts:
            offset = self._room(part.size)
            if offset is None:
                return None
            pieces.append((offset, part.size))
            for tensor, address, size in part.spans:
                if device is None or stream is None:
                    self.ring.memory[offset : offset + size].copy_(tensor)
                else:
                    device.read(offset, address, size, stream)
                offset += size
        return pieces

    def end_pass(self) -> None:
        """A pass is at its end; several are handed over at once."""
        self._passes += 1
        if self._passes >= PASSES:
            self.flush()

    def flush(self) -> Tickets:
        """Hand what was collected to the writer; returns its tickets where copies are still under way."""
        self._passes = 0
        if not self._records and self.ring.mark == self._since:
            return ()
        tickets: Tickets = ()
        if self._streams and self.device is not None:
            tickets = tuple(self.device.mark(stream) for stream in self._streams)
        records, self._records = self._records, []
        self._streams, self._since = [], self.ring.mark
        entry: Entry = (tickets, self._since, records)
        if self.spooler.submit(entry):
            return tickets

        def again() -> int | None:
            return 0 if self.spooler.submit(entry) else None

        if self.pressure.wait(again, self._goes_on) is None:
            self._lost(records)
        return tickets

    def _goes_on(self) -> bool:
        return self.spooler.stopped is None

    def _lost(self, records: Sequence[Record]) -> None:
        for number in sorted({_pass_of(*record[:2]) for record in records} - {None}):
            self.ledger.add("the writer fell behind, and too many records waited for it", number)

    def _room(self, size: int) -> int | None:
        offset = self.ring.reserve(size)
        if offset is not None or not self.ring.fits(size):
            return offset
        # What is held back here may itself be what fills the ring.
        self.flush()
        return self.pressure.wait(lambda: self.ring.reserve(size), self._goes_on)


def _pass_of(kind: str, header: Any) -> Any:
    return header[1] if kind == "block" else header.get("pass")
