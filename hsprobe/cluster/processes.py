"""Shards worked on by this process and by others of this machine, which are started where that pays.

Plain child processes that are told through a pipe what to do. A pool of the standard library or of `loky` is
not used: the first runs the caller's script once more in every worker, the workers of the second live on
when this process is killed, and either imports from the folder that the user stands in, where a dump may lie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Any, Self, TypeVar

from hsprobe.cluster.cores import usable_cores
from hsprobe.cluster.work import Trouble, ahead, answered, work
from hsprobe.cluster.worker import Ended, Worker
from hsprobe.compare.shards import SHARD_BYTES, Direct, Shard, run
from hsprobe.compare.tables import Tables
from hsprobe.errors import HsprobeError
from hsprobe.remote.location import Location

T = TypeVar("T")
U = TypeVar("U")

PAYS = 8
"""Shards, or other tasks, that pay for the start of a worker, which takes as long as three to eight."""
_IN_FLIGHT = 3
"""Tasks given out for each worker: one that runs, others that wait for it or for their turn to be merged."""
_TRIES = 8
"""How often a task is done again because its worker died."""


class _Task:
    """Something to do, by whoever comes first: a worker, or this process when it would have to wait."""

    def __init__(self, here: Callable[[], Any]) -> None:
        self.found: Future[Any] = Future()
        self._here = here

    def do_here(self) -> None:
        """Do it now, unless a worker has begun. What goes wrong is told by `answer`, in its turn."""
        if self.found.cancel():
            self.found = Future()
            try:
                self.found.set_result(self._here())
            except Exception as error:
                self.found.set_exception(error)

    def answer(self) -> Any:
        """What came of it."""
        found = self.found.result()
        if isinstance(found, Trouble):
            raise found.raised()
        return found


class ProcessEngine:
    """See `Engine`; a context manager that ends its workers.

    This process does its share: it begins before any worker has started, and goes on while it waits for
    them. A small comparison starts none.

    Args:
        workers: processes that compute, this one included; by default one a usable core.
        given: what will be compared: of large files it is plain from the start that workers pay.
        pays: shards that pay for the start of one.
    """

    def __init__(self, workers: int | None = None, given: Iterable[Location] = (), pays: int = PAYS) -> None:
        self._given = [path for path in given if isinstance(path, Path) and path.is_file()]
        self._most = (workers or usable_cores()) - 1
        self._pays = pays
        self._seen = 0
        self._tasks: SimpleQueue[tuple[Future[Any], tuple[Any, ...]] | None] = SimpleQueue()
        self._workers: list[tuple[Worker, Thread]] = []
        self.spread = self._most > 0

    def __enter__(self) -> Self:
        self._start(sum(path.stat().st_size for path in self._given) // SHARD_BYTES)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker, _ in self._workers:
            worker.stop()
            self._tasks.put(None)
        for _, thread in self._workers:
            thread.join()
        self._workers.clear()

    def run(self, shards: Iterable[Shard], tables: Tables) -> Iterator[list[Direct]]:
        """See `Engine`."""
        return self._in_turn(self._shard(shard, tables) for shard in shards)

    def map(self, function: Callable[[T], U], items: Iterable[T]) -> Iterator[U]:
        """See `Engine`."""
        return self._in_turn(self._item(function, item) for item in items)

    def remember(self, key: str, make: Callable[[], T]) -> T:
        """See `Engine`."""
        return make()

    def _shard(self, shard: Shard, tables: Tables) -> _Task:
        self._seen += 1
        return self._task(shard.portable, partial(run, shard, tables), work, shard, {})

    def _item(self, function: Callable[[T], U], item: T) -> _Task:
        self._seen += 1
        return self._task(True, partial(function, item), answered, function, item)

    def _task(self, portable: bool, here: Callable[[], Any], *there: Any) -> _Task:
        """A task that is given out where there are workers for it."""
        self._start(self._seen)
        task = _Task(here)
        if portable and self._workers:
            self._tasks.put((task.found, there))
        return task

    def _start(self, shards: int) -> None:
        """As many workers as so many shards pay for."""
        while len(self._workers) < min(self._most, shards // self._pays):
            worker = Worker()
            thread = Thread(target=self._feed, args=(worker,), name="hsprobe worker", daemon=True)
            self._workers.append((worker, thread))
            thread.start()

    def _in_turn(self, tasks: Iterable[_Task]) -> Iterator[Any]:
        """The answers in the order of the tasks."""
        behind: Sequence[_Task] = ()
        try:
            for task, behind in ahead(tasks, self._pays + _IN_FLIGHT * self._most):
                for one in (task, *behind):
                    if task.found.done():
                        break
                    one.do_here()
                yield task.answer()
        finally:
            for task in behind:
                task.found.cancel()

    def _feed(self, worker: Worker) -> None:
        """What a thread does: hand task after task to a worker."""
        with suppress(Ended):
            worker.start()
        while (task := self._tasks.get()) is not None:
            found, there = task
            if found.set_running_or_notify_cancel():
                try:
                    found.set_result(_asked(worker, there))
                except Exception as error:
                    found.set_exception(error)
        worker.end()


def _asked(worker: Worker, there: tuple[Any, ...]) -> Any:
    """The answer of a worker, or of the next one where that dies."""
    for left in reversed(range(_TRIES)):
        try:
            return worker.ask(*there)
        except Ended as error:
            if not left:
                raise HsprobeError(
                    f"A worker process ended {_TRIES} times over in the middle of its work: {error}.",
                    "Check that there is memory left, or compare in one process: --workers 1.",
                ) from error
    return None
