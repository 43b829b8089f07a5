"""Fletcher-32 as HDF5 stores it behind a chunk, by array arithmetic, several times as fast."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

LENGTH = 4
"""Bytes of a checksum."""

_ONES = 65535
# Words are added up along a table this wide and down it, modulo 2**32; sums of half-words stay below that.
_WIDTH = 2048
_MOST = 32 << 20
_PLACES = np.arange(_WIDTH)


class Fletcher32:
    """Computes checksums, one at a time, in buffers that are kept."""

    def __init__(self) -> None:
        self._high = np.empty((0, _WIDTH), np.uint32)

    def matches(self, data: npt.NDArray[np.uint8], stored: bytes) -> bool:
        """Whether this is the checksum of the bytes; their number is a multiple of 4.

        Raises:
            ValueError: it is not, or is too large.
        """
        if len(data) % 4 or len(data) > _MOST:
            raise ValueError(f"{len(data)} bytes cannot be summed up")
        first, second = self._of(data.view("<u4"))
        value = int.from_bytes(stored, "little")
        # HDF5 folds its sums, so that 0 and 65535 stand for the same.
        return ((value & 0xFFFF) - first) % _ONES == 0 == ((value >> 16) - second) % _ONES

    def _of(self, words: npt.NDArray[np.uint32]) -> tuple[int, int]:
        """Sum of the half-words, and of what that is after each of them, modulo 65535."""
        count, rows = 2 * len(words), len(words) // _WIDTH
        if rows > len(self._high):
            self._high = np.empty((rows, _WIDTH), np.uint32)
        table = words[: rows * _WIDTH].reshape(rows, _WIDTH)
        high = np.right_shift(table, 16, out=self._high[:rows])
        by_row, odd_by_row = _both(table, high, 1)
        by_column, _ = _both(table, high, 0)
        # The half-word at place i counts count - i times; the higher one of a word once less than the lower.
        first = int(by_row.sum())
        second = int(by_row @ (count - 2 * _WIDTH * np.arange(rows))) - int(odd_by_row.sum(dtype=np.int64))
        second -= 2 * int(by_column @ _PLACES)
        if rows * _WIDTH < len(words):
            rest = words[rows * _WIDTH :].astype(np.int64)
            low, odd = rest & 0xFFFF, rest >> 16
            left = count - 2 * np.arange(rows * _WIDTH, len(words))
            first += int(low.sum() + odd.sum())
            second += int(low @ left + odd @ (left - 1))
        # Half-words are stored high byte first: swapping the bytes of all multiplies every sum by 256.
        return 256 * first % _ONES, 256 * second % _ONES


def _both(
    words: npt.NDArray[np.uint32], high: npt.NDArray[np.uint32], axis: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32]]:
    """(sums of all half-words, of the higher ones) along an axis.

    The sum of the words, though it wraps around, less that of the higher halves is the sum of the lower ones.
    """
    odd = np.add.reduce(high, axis=axis, dtype=np.uint32)
    whole = np.add.reduce(words, axis=axis, dtype=np.uint32)
    return (whole - odd * np.uint32(_ONES)).astype(np.int64), odd
