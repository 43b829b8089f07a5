"""Who runs the shards of a comparison: this process, unless a caller puts another engine in its place."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain, islice
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
    """Runs them here, on all the cores that this process may use."""

    spread = False

    def run(self, shards: Iterable[Shard], tables: Tables) -> Iterator[list[Direct]]:
        """In the order of the shards."""
        return in_threads(lambda shard: run(shard, tables), shards)

    def map(self, function: Callable[[T], U], items: Iterable[T]) -> Iterator[U]:
        """One after the other."""
        return map(function, items)

    def remember(self, key: str, make: Callable[[], T]) -> T:
        """Nothing is continued."""
        return make()


def in_threads(work: Callable[[T], U], items: Iterable[T]) -> Iterator[U]:
    """The results of some work on every item, in their order, with few items under way at a time.

    Reading and arithmetic leave the interpreter to other threads, so that one reads while another computes.
    """
    waiting = iter(items)
    first = list(islice(waiting, 2))
    count = cores()
    if len(first) < 2 or count < 2:
        yield from map(work, chain(first, waiting))
        return
    with ThreadPoolExecutor(count) as pool:
        under_way: deque[Future[U]] = deque()
        try:
            for item in chain(first, waiting):
                under_way.append(pool.submit(work, item))
                if len(under_way) > 2 * count:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            for future in under_way:
                future.cancel()


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
