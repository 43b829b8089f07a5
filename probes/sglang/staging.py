"""Takes copies of live tensors into the ring, in the server's own thread, without waiting for the device.

Letters: n rows of a tensor, W its width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hsprobe.probes.sglang.pressure import Ledger, Pressure
from hsprobe.probes.sglang.ring import Ring
from hsprobe.probes.sglang.sampling import Runs
from hsprobe.probes.sglang.spooling import Job, Part, Piece, Spooler

HELD_SHARE = 8
"""A job is handed over, though its pass is not at its end, once it holds this part of the ring."""


class Stage:
    """Collects the records of a pass and hands them to the writer together.

    Args:
        spooler: the writer; it returns the ring's space.
        ring: where copies go.

    Attributes:
        pressure: what to do without room.
        ledger: what is missing.
    """

    def __init__(self, spooler: Spooler, ring: Ring, pressure: Pressure) -> None:
        self.spooler = spooler
        self.ring = ring
        self.pressure = pressure
        self.ledger = Ledger()
        self._records: list[tuple[str, dict[str, Any], Sequence[Part]]] = []
        self._on_device = False
        self._since = ring.mark

    def add(self, kind: str, header: dict[str, Any], pieces: Sequence[Part] = ()) -> None:
        """A record whose bytes were copied by this stage."""
        self._records.append((kind, header, pieces))
        if (self.ring.mark - self._since) * HELD_SHARE > self.ring.capacity:
            self.flush()

    def copy(self, tensor_nW: torch.Tensor, runs: Runs | None = None) -> Piece | None:
        """Copy rows, or all of a tensor of any shape, in C order; None without room.

        Args:
            runs: which rows, as [first, last) runs; None for all.
        """
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
        self._on_device |= tensor_nW.is_cuda
        return Piece(offset, size)

    def bits(self, source: torch.Tensor, size: int) -> Piece | None:
        """Copy `size` bytes that lie in one piece; None without room."""
        offset = self.ring.reserve(size)
        if offset is None and (offset := self._room(size)) is None:
            return None
        self.ring.memory[offset : offset + size].copy_(source, non_blocking=True)
        self._on_device |= source.is_cuda
        return Piece(offset, size)

    def flush(self) -> None:
        """Hand what was collected to the writer; copies still under way end with an event."""
        if not self._records and self.ring.mark == self._since:
            return
        event = None
        if self._on_device:
            event = self.spooler.events.pop() if self.spooler.events else torch.cuda.Event()
            event.record()
        self._since = self.ring.mark
        self.spooler.submit(Job(self._records, event, self._since))
        self._records, self._on_device = [], False

    def _room(self, size: int) -> int | None:
        offset = self.ring.reserve(size)
        if offset is not None or not self.ring.fits(size):
            return offset
        # What is held back here may itself be what fills the ring.
        self.flush()
        return self.pressure.wait(lambda: self.ring.reserve(size), lambda: self.spooler.stopped is None)
