"""A reader of which nothing comes but what a person may see, however a damaged dump makes it stumble.

Readers check what they know may be wrong. This is for what they do not: an axis that is not there, a number
that is a list, a shape that no producer writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hsprobe.errors import HsprobeError
from hsprobe.formats.dump import Reader, Sample
from hsprobe.formats.stored import Ints, damaged

_STUMBLES = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    OSError,
    RecursionError,
    TypeError,
    ValueError,
)


@contextmanager
def sensible(name: str) -> Iterator[None]:
    """Turn whatever a reader stumbles over in `name` into an HsprobeError that names it."""
    try:
        yield
    except HsprobeError:
        raise
    except _STUMBLES as error:
        raise damaged(name, "its contents make no sense together") from error


class Guarded:
    """See `Reader`; another one, with its stumbles caught."""

    def __init__(self, reader: Reader, path: str) -> None:
        self.layout = reader.layout
        self._reader, self._path = reader, path

    def names(self) -> Iterator[str]:
        """See `Reader`."""
        with sensible(self._path):
            yield from self._reader.names()

    def tokens(self, name: str) -> Ints | None:
        """See `Reader`."""
        with sensible(name):
            return self._reader.tokens(name)

    def sample(self, name: str) -> Sample:
        """See `Reader`."""
        with sensible(name):
            return self._reader.sample(name)
