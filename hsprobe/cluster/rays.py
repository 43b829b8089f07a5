"""Shards spread over the workers of a Ray cluster, or of one started here for the time of the work.

Ray is imported when an engine is used. A shard whose worker dies is done again by another.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

from hsprobe.cluster.cores import usable_cores
from hsprobe.cluster.work import Trouble, ahead, answered, files_of, size_of, work
from hsprobe.compare.shards import Direct, Shard, run
from hsprobe.compare.tables import Tables
from hsprobe.errors import HsprobeError

T = TypeVar("T")
U = TypeVar("U")
_OBJECT_STORE_BYTES = 128 << 20
_IN_FLIGHT = 3
"""Tasks given out for each CPU: one that runs, others that wait for it or for their turn to be merged."""
_TRIES = 8
"""How often a task is done again because its worker died."""
_STARTS = 3
_KNOCK_SECONDS = 10
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Set to 0, Ray takes 127.0.0.1 as it is and binds all ports there; else it makes the outer address of it."""


class RayEngine:
    """See `Engine`; a context manager that leaves the cluster, and ends one that it started.

    Args:
        address: of a cluster ("auto", "host:port", "ray://host:port"); None starts one on this machine, that
            listens on loopback alone.
        workers: processes of one that is started; by default one a usable core.

    Raises:
        HsprobeError: on entering: Ray is not installed, or there is no such cluster.
    """

    spread = True

    def __init__(self, address: str | None = None, workers: int | None = None) -> None:
        self._address = address
        self._workers = workers or usable_cores()
        self._ray: Any = None
        self._ours = False
        self._worker_module: Any = None
        self._printing: Any = None
        self._sizes: dict[str, int] = {}

    def __enter__(self) -> Self:
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)
        if self._address is None:
            # Read when Ray is imported.
            os.environ.setdefault(_LOOPBACK, "0")
        try:
            import ray
        except ImportError:
            raise HsprobeError(
                "--engine ray needs Ray, which is not installed.", "Run: pip install 'hsprobe[ray]'"
            ) from None
        self._ray = ray
        self._ours = not ray.is_initialized()
        if self._ours:
            if self._address is None:
                self._start()
            else:
                self._join(self._address)
        self._hush()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ours:
            self._ray.shutdown()
        self._worker_module.print_to_stdstream = self._printing

    def _hush(self) -> None:
        """Ray prints that a worker died whatever it was told of logs; what matters comes as an error."""
        from ray._private import worker

        self._worker_module, self._printing = worker, worker.print_to_stdstream
        worker.print_to_stdstream = _nowhere

    def _start(self) -> None:
        for left in reversed(range(_STARTS)):
            try:
                self._ray.init(
                    num_cpus=self._workers,
                    include_dashboard=False,
                    _node_ip_address="127.0.0.1",
                    object_store_memory=_OBJECT_STORE_BYTES,
                    log_to_driver=False,
                    logging_level=logging.CRITICAL,
                )
                return
            except Exception as error:
                # Ray raises bare exceptions here, also where a start under load takes longer than it waits.
                self._ray.shutdown()
                if not left:
                    raise HsprobeError(
                        f"Ray could not be started on this machine: {_line(error)}.",
                        "Run again without --engine ray, or when the machine has less to do.",
                    ) from error

    def _join(self, address: str) -> None:
        try:
            _knock(address)
            self._ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL)
        except Exception as error:
            raise HsprobeError(
                f"There is no Ray cluster to be reached at {address}: {_line(error)}.",
                "Check --ray-address, or leave it out to start workers on this machine.",
            ) from error

    def run(self, shards: Iterable[Shard], tables: Tables) -> Iterator[list[Direct]]:
        """See `Engine`. What only this process can reach is done here."""
        task = self._task(work)

        def given(shard: Shard) -> tuple[Any, Any]:
            if shard.portable:
                return task.remote(shard, self._sizes_of(shard)), None
            return None, run(shard, tables)

        return self._in_turn(given(shard) for shard in shards)

    def map(self, function: Callable[[T], U], items: Iterable[T]) -> Iterator[U]:
        """See `Engine`."""
        task = self._task(answered)
        return self._in_turn((task.remote(function, item), None) for item in items)

    def _in_turn(self, tasks: Iterable[tuple[Any, Any]]) -> Iterator[Any]:
        return (self._answer(*task) for task, _ in ahead(tasks, self._room))

    def remember(self, key: str, make: Callable[[], T]) -> T:
        """See `Engine`."""
        return make()

    @property
    def _room(self) -> int:
        """Tasks to give out before one has to be done."""
        return _IN_FLIGHT * max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def _task(self, function: Callable[..., Any]) -> Any:
        return self._ray.remote(num_cpus=1, max_retries=_TRIES)(function)

    def _sizes_of(self, shard: Shard) -> dict[str, int]:
        for file in files_of(shard):
            if file not in self._sizes:
                self._sizes[file] = size_of(file)
        return {file: self._sizes[file] for file in files_of(shard)}

    def _answer(self, task: Any, here: Any) -> Any:
        """What a task gives; without one, what was done here."""
        if task is None:
            return here
        try:
            answer = self._ray.get(task)
        except self._ray.exceptions.RayError as error:
            raise HsprobeError(
                f"A Ray worker failed, {_TRIES} times over where it was tried again: {_line(error)}.",
                "Check that the workers have memory left and the same hsprobe installed.",
            ) from error
        if isinstance(answer, Trouble):
            raise answer.raised()
        return answer


def _knock(address: str) -> None:
    """Raise OSError where nothing listens: Ray itself waits for minutes."""
    from ray._private.services import resolve_ip_for_localhost

    address = os.environ.get("RAY_ADDRESS", address) if address == "auto" else address
    plain = address.removeprefix("ray://")
    host, colon, port = plain.rpartition(":")
    if colon and port.isdecimal():
        # Of a loopback address, Ray makes the outer one of this machine.
        host = host if plain != address else resolve_ip_for_localhost(host)
        socket.create_connection((host, int(port)), _KNOCK_SECONDS).close()


def _nowhere(*words: object, **more: object) -> None:
    pass


def _line(error: BaseException) -> str:
    """The last line of an error's text, where Ray puts what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:200].rstrip(".")
