"""A ring of host memory, pinned where there is a GPU: the probe takes space in order, the writer returns it.

One thread takes and another returns, so a plain integer on each side is enough.
"""

import torch

ALIGNMENT = 64


class Ring:
    """Space for bytes on their way from the server's stream to the spool.

    Args:
        capacity: bytes; never more is held.
        pinned: page-locked memory, which a GPU writes to without the server waiting for it.

    Attributes:
        memory: [capacity] uint8 tensor.
        view: the same memory as bytes.
    """

    def __init__(self, capacity: int, *, pinned: bool) -> None:
        self.capacity = max(capacity // ALIGNMENT, 1) * ALIGNMENT
        self.memory = torch.empty(self.capacity, dtype=torch.uint8, pin_memory=pinned)
        self.view = self.memory.numpy().data
        self._taken = 0
        self._returned = 0

    @property
    def used(self) -> int:
        """Bytes taken and not yet returned, what is left empty at the end of the ring included."""
        return self._taken - self._returned

    @property
    def mark(self) -> int:
        """How far space has been taken; `release` takes it back up to here."""
        return self._taken

    def reserve(self, size: int) -> int | None:
        """Offset of `size` bytes in one piece, or None while there is no room for them."""
        size = -(-size // ALIGNMENT) * ALIGNMENT
        start = self._taken
        offset = start % self.capacity
        if offset + size > self.capacity:
            start, offset = start + self.capacity - offset, 0
        if start + size - self._returned > self.capacity:
            return None
        self._taken = start + size
        return offset

    def fits(self, size: int) -> bool:
        """Whether `size` bytes could ever be had."""
        return size <= self.capacity

    def release(self, mark: int) -> None:
        """Return everything taken up to a `mark`. Called in the order in which it was taken."""
        self._returned = mark
