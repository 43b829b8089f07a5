"""The switch by which a capture tells a server's probes to record: memory that both map from a file.

A server looks at it before each of its steps, which takes no call of the system: where a step takes a
millisecond, asking for a file by its name took a hundredth of it. Standard library only.
"""

import mmap
import os
import zlib
from pathlib import Path

from hsprobe.errors import HsprobeError

NAME = "switch"
SIZE = 1 << 16
_NUMBER, _LAST, _LENGTH, _CHECKSUM = range(4)
_TEXT = 32


class Switch:
    """The switch of one spool folder, which is made where there is none.

    Args:
        folder: a folder that is private to this user.

    Raises:
        OSError: its file cannot be made or mapped.
    """

    def __init__(self, folder: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(folder / NAME, flags, 0o600)
        try:
            if os.fstat(descriptor).st_size < SIZE:
                os.ftruncate(descriptor, SIZE)
            memory = mmap.mmap(descriptor, SIZE)
        finally:
            os.close(descriptor)
        view = memoryview(memory)
        self._words = view[:_TEXT].cast("Q")
        self._text = view[_TEXT:]

    @property
    def number(self) -> int:
        """0 while nothing is to be recorded; every capture has a number of its own."""
        return self._words[_NUMBER]

    def asked(self) -> str | None:
        """What the capture asked for; None where it is not all there yet.

        Raises:
            ValueError: it is not text.
        """
        length = self._words[_LENGTH]
        data = bytes(self._text[: min(length, len(self._text))])
        if zlib.crc32(data) != self._words[_CHECKSUM]:
            return None
        return data.decode()

    def turn_on(self, asked: str = "") -> None:
        """Have the probes record.

        Args:
            asked: what to record, as `probes.sglang.sampling.Sampling.changed` reads it.

        Raises:
            HsprobeError: it is longer than there is room for.
        """
        data = asked.encode()
        if len(data) > len(self._text):
            raise HsprobeError(
                f"What to record takes {len(data)} bytes.", f"Say it in {len(self._text)} or fewer."
            )
        words = self._words
        words[_NUMBER] = 0
        self._text[: len(data)] = data
        words[_LENGTH], words[_CHECKSUM] = len(data), zlib.crc32(data)
        words[_LAST] += 1
        words[_NUMBER] = words[_LAST]

    def turn_off(self) -> None:
        """Have the probes record no more."""
        self._words[_NUMBER] = 0
