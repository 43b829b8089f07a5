"""How shards are given out, and what a worker process does with one.

Plain functions, and answers that never fail to be carried home.

A worker keeps the files it has opened, for the next shard.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from hsprobe.compare.shards import Direct, Shard, run
from hsprobe.compare.tables import Source, Tables
from hsprobe.errors import HsprobeError
from hsprobe.remote.location import Remote, locate
from hsprobe.remote.stream import RemoteFile

T = TypeVar("T")


def ahead(tasks: Iterable[T], room: int) -> Iterator[tuple[T, Sequence[T]]]:
    """Each of the tasks in its turn, with those behind it that have been given out: up to `room` in all."""
    waiting: deque[T] = deque()
    for task in tasks:
        waiting.append(task)
        if len(waiting) >= room:
            yield waiting.popleft(), waiting
    while waiting:
        yield waiting.popleft(), waiting


@dataclass(frozen=True)
class Trouble:
    """An `HsprobeError` that happened to a worker.

    Attributes:
        what, fix: its sentences.
    """

    what: str
    fix: str

    def raised(self) -> HsprobeError:
        """The error again."""
        return HsprobeError(self.what, self.fix)


def files_of(shard: Shard) -> set[str]:
    """The files that a shard reads."""
    sides = [side for side in (shard.left, shard.right) if isinstance(side, Source)]
    return {place.file for side in sides for place in side.places}


def size_of(file: str) -> int:
    """Bytes of a file, local or behind a URL.

    Raises:
        HsprobeError, OSError: it cannot be reached.
    """
    where = locate(file)
    return RemoteFile(where).size if isinstance(where, Remote) else where.stat().st_size


def work(shard: Shard, sizes: Mapping[str, int]) -> list[Direct] | Trouble:
    """Do a shard.

    Args:
        sizes: bytes of its files where the shard comes from, unless that is this machine; a file that differs
            here is another one.
    """
    trouble = _unreachable(sizes)
    if trouble is not None:
        return trouble
    try:
        return run(shard, _kept())
    except HsprobeError as error:
        return Trouble(error.what, error.fix)


@cache
def _kept() -> Tables:
    """What this worker has open."""
    return Tables()


_seen: set[tuple[str, int]] = set()


def _unreachable(sizes: Mapping[str, int]) -> Trouble | None:
    for file, size in sizes.items():
        if (file, size) in _seen:
            continue
        try:
            here: int | None = size_of(file)
        except (OSError, HsprobeError):
            here = None
        if here != size:
            how = "cannot open" if here is None else "has another file at"
            return Trouble(
                f"The worker on {socket.gethostname()} {how} {locate(file)}.",
                "Put it where every worker can read it: a shared file system, or s3://, gs:// or hf://.",
            )
        _seen.add((file, size))
    return None


def answered(function: Callable[[Any], Any], item: Any) -> Any:
    """The value of a function, or the `Trouble` it ran into."""
    try:
        return function(item)
    except HsprobeError as error:
        return Trouble(error.what, error.fix)
