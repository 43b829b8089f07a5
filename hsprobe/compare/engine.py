"""Who runs the shards of a comparison: this process, unless a caller puts another engine in its place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from hsprobe.compare.shards import Direct, Shard, run
from hsprobe.compare.tables import Tables


class Engine(Protocol):
    """Runs shards."""

    def run(self, shards: Iterable[Shard], tables: Tables) -> Iterator[list[Direct]]:
        """What `shards.run` gives for every one of the shards, in any order.

        Args:
            tables: what this process has open.

        Raises:
            HsprobeError: a file is missing or damaged.
        """
        ...


class Local:
    """Runs them here."""

    def run(self, shards: Iterable[Shard], tables: Tables) -> Iterator[list[Direct]]:
        """One after the other."""
        for shard in shards:
            yield run(shard, tables)


_engine: ContextVar[Engine] = ContextVar("engine")
_LOCAL = Local()


def current() -> Engine:
    """The engine in use."""
    return _engine.get(_LOCAL)


@contextmanager
def using(engine: Engine) -> Iterator[None]:
    """Comparisons inside the `with` block are run by this engine."""
    token = _engine.set(engine)
    try:
        yield
    finally:
        _engine.reset(token)
