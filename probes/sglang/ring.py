"""A ring of memory that the server takes space of in order, and its writer returns."""

import torch

from hsprobe.probes.sglang.shared import RETURNED, Shared
from hsprobe.probes.sglang.writer import ALIGNMENT


class Ring:
    """Space for bytes on their way from the server's stream to the spool.

    Args:
        shared: the memory; its ring is all the space there is.

    Attributes:
        capacity: bytes; never more is held.
        memory: [capacity] uint8 tensor.
    """

    def __init__(self, shared: Shared) -> None:
        self.capacity = shared.capacity
        self.memory = torch.frombuffer(
            shared.map, dtype=torch.uint8, count=shared.capacity, offset=shared.ring_offset
        )
        self._words = shared.words
        self._taken = 0

    @property
    def used(self) -> int:
        """Bytes taken and not yet returned, what is left empty at the end of the ring included."""
        return self._taken - self._words[RETURNED]

    @property
    def mark(self) -> int:
        """How far space has been taken; the writer returns it up to such a mark."""
        return self._taken

    def reserve(self, size: int) -> int | None:
        """Offset of `size` bytes in one piece, or None while there is no room for them."""
        size = -(-size // ALIGNMENT) * ALIGNMENT
        start = self._taken
        offset = start % self.capacity
        if offset + size > self.capacity:
            start, offset = start + self.capacity - offset, 0
        if start + size - self._words[RETURNED] > self.capacity:
            return None
        self._taken = start + size
        return offset

    def fits(self, size: int) -> bool:
        """Whether `size` bytes could ever be had."""
        return size <= self.capacity


def capacity_of(size: int) -> int:
    """The ring's capacity for a budget of `size` bytes."""
    return max(size // ALIGNMENT, 1) * ALIGNMENT
