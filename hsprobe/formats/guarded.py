"""A reader of which nothing comes but what a person may see, however a damaged dump makes it stumble.

Readers check what they know may be wrong. This is for what they do not: an axis that is not there, a number
that is a list, a shape that no producer writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hsprobe.errors import HsprobeError
from hsprobe.formats.dump import Reader, Sample
from hsprobe.formats.source import Source
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
def sensible(source: Source, name: str) -> Iterator[None]:
    """Turn whatever a reader stumbles over in `name` into an HsprobeError that names it.

    A lost connection is raised, also where the reader passed over it as over a damaged sample.
    """
    try:
        yield
    except HsprobeError:
        source.check()
        raise
    except _STUMBLES as error:
        source.check()
        raise damaged(name, "its contents make no sense together") from error
    source.check()


class Guarded:
    """See `Reader`; another one, with its stumbles caught."""

    def __init__(self, reader: Reader, source: Source) -> None:
        self.layout = reader.layout
        self._reader, self._source = reader, source

    def names(self) -> Iterator[str]:
        """See `Reader`."""
        with sensible(self._source, str(self._source.path)):
            yield from self._reader.names()

    def tokens(self, name: str) -> Ints | None:
        """See `Reader`."""
        with sensible(self._source, name):
            return self._reader.tokens(name)

    def sample(self, name: str) -> Sample:
        """See `Reader`."""
        with sensible(self._source, name):
            return self._reader.sample(name)
