"""Who runs the shards of a comparison: this process, unless a caller puts another engine in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol, TypeVar

from hsprobe.compare.shards import Direct, Shard, run
from hsprobe.compare.tables import Tables

T = TypeVar("T")
U = TypeVar("U")


class Engine(Protocol):
    """Runs shards, and other work that is cut into pieces.

    Attributes:
        spread: whether `map` sends its items to other processes.
    """

    spread: bool

    def run(self, shards: Iterable[Shard], tables: Tables) -> Iterator[list[Direct]]:
        """What `shards.run` gives for every one of the shards, in their order, so that sums round alike.

        Args:
            tables: what this process has open.

        Raises:
            HsprobeError: a file is missing or damaged.
        """
        ...

    def map(self, function: Callable[[T], U], items: Iterable[T]) -> Iterator[U]:
        """The value of a function of a module for each item, in the order of the items; all can be pickled.

        Raises:
            HsprobeError: as the function raises it.
        """
        ...

    def remember(self, key: str, make: Callable[[], T]) -> T:
        """What `make` gives, plain JSON; or what it gave in an earlier run that this one continues."""
        ...


class Local:
    """Runs them here, one after the other.

    Threads would only wait for the interpreter: what numpy does to a tile takes some ten microseconds, no
    more than handing the interpreter over. Two of them took 1.4 times the CPU and no less time. Processes do
    scale: see `ProcessEngine` and `RayEngine`.
    """

    spread = False

    def run(self, shards: Iterable[Shard], tables: Tables) -> Iterator[list[Direct]]:
        """In the order of the shards."""
        return (run(shard, tables) for shard in shards)

    def map(self, function: Callable[[T], U], items: Iterable[T]) -> Iterator[U]:
        """One after the other."""
        return map(function, items)

    def remember(self, key: str, make: Callable[[], T]) -> T:
        """Nothing is continued."""
        return make()


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
