"""An engine that does not do again what a journal has, around one that does the rest."""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from hsprobe import __version__
from hsprobe.cluster.journal import Journal
from hsprobe.compare.engine import Engine
from hsprobe.compare.shards import Direct, Shard
from hsprobe.compare.statistics import ErrorStats
from hsprobe.compare.tables import Source as Tensors
from hsprobe.compare.tables import Table, Tables
from hsprobe.formats.source import Source
from hsprobe.remote.location import Location, address, identity

T = TypeVar("T")
U = TypeVar("U")


class Continued:
    """See `Engine`.

    Args:
        engine: does what the journal lacks.
        given: what is compared, as it was given. Any other file is one made of them, known by its name alone.

    Attributes:
        taken: shards whose results an earlier run had.
    """

    def __init__(self, engine: Engine, journal: Journal, given: Iterable[Location]) -> None:
        self._engine, self._journal = engine, journal
        self._given = {address(where): identity(where) for where in given}
        self.spread = engine.spread
        self.taken = 0

    def run(self, shards: Iterable[Shard], tables: Tables) -> Iterator[list[Direct]]:
        """See `Engine`."""
        pending: list[tuple[str, list[Direct] | None]] = []

        def left() -> Iterator[Shard]:
            for shard in shards:
                key = "" if not shard.portable else self._key(shard)
                entry = self._journal.get(key) if key else None
                pending.append((key, None if entry is None else [decoded(one) for one in entry]))
                if entry is None:
                    yield shard

        # The inner engine takes shards ahead of what it gives back, in the same order.
        for result in self._engine.run(left(), tables):
            yield from self._done_before(pending)
            key, _ = pending.pop(0)
            if key:
                self._journal.put(key, [encoded(one) for one in result])
            yield result
        yield from self._done_before(pending)

    def _done_before(self, pending: list[tuple[str, list[Direct] | None]]) -> Iterator[list[Direct]]:
        while pending and pending[0][1] is not None:
            known = pending.pop(0)[1]
            if known is not None:
                self.taken += 1
                yield known

    def map(self, function: Callable[[T], U], items: Iterable[T]) -> Iterator[U]:
        """See `Engine`."""
        return self._engine.map(function, items)

    def remember(self, key: str, make: Callable[[], Any]) -> Any:
        """See `Engine`."""
        known = self._journal.get(f"once {key}")
        if known is None:
            known = make()
            self._journal.put(f"once {key}", known)
        return known

    def _key(self, shard: Shard) -> str:
        """A hash of all that the result of a shard depends on, given the files that the journal is of."""
        found = hashlib.sha256()
        for side in (shard.left, shard.right):
            found.update(repr(self._names(side)).encode())
        for job in shard.jobs:
            limits = sorted(job.limits.items()) if isinstance(job.limits, Mapping) else job.limits
            found.update(repr((job.left, job.right, limits)).encode())
            found.update(np.ascontiguousarray(job.scale).tobytes())
        for column in (shard.left_rows, shard.right_rows, shard.phases):
            found.update(np.ascontiguousarray(column).tobytes())
        found.update(b"routed" if shard.routed else b"")
        return found.hexdigest()

    def _names(self, side: Tensors | Table) -> list[tuple[str, str]]:
        if not isinstance(side, Tensors):
            return []
        return [(self._given.get(one.file, Path(one.file).name), one.group) for one in side.places]


def about(inputs: Mapping[str, tuple[Location, str]]) -> dict[str, Any]:
    """What a journal is of: this version, and of each input its place, what is known of its content, and how.

    Args:
        inputs: name -> (where it lies, how it is read).

    Raises:
        HsprobeError: there is nothing there.
    """
    found: dict[str, Any] = {"hsprobe": __version__}
    for name, (where, how) in inputs.items():
        found[name] = [identity(where), *_state(where), how]
    return found


def _state(where: Location) -> list[str | int]:
    """Number of files, their bytes, and a hash of their names, sizes and times."""
    source = Source(where)
    found, count, total = hashlib.sha256(), 0, 0
    for name in source.files():
        size, mark = source.state_of(name)
        found.update(f"{name}\0{size}\0{mark}\n".encode("utf-8", "surrogateescape"))
        count, total = count + 1, total + size
    return [count, total, found.hexdigest()]


_KINDS: dict[str, type] = {kind.__name__: kind for kind in (Direct, ErrorStats)}


def encoded(value: Any) -> Any:
    """Statistics as JSON. Numbers come back bit for bit."""
    if isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return {"f": value.hex()}
    if isinstance(value, np.ndarray):
        bits = base64.b64encode(zlib.compress(np.ascontiguousarray(value).tobytes(), 1)).decode()
        return {"a": value.dtype.str, "s": list(value.shape), "b": bits}
    if isinstance(value, dict):
        return {"d": [[encoded(key), encoded(one)] for key, one in value.items()]}
    kind = type(value).__name__
    if kind not in _KINDS:
        raise TypeError(f"no way to write down a {kind}")
    return {"k": kind, "v": {one.name: encoded(getattr(value, one.name)) for one in fields(value)}}


def decoded(found: Any) -> Any:
    """The statistics again."""
    if not isinstance(found, dict):
        return found
    if "f" in found:
        return float.fromhex(found["f"])
    if "a" in found:
        bits = zlib.decompress(base64.b64decode(found["b"]))
        return np.frombuffer(bits, np.dtype(found["a"])).reshape(found["s"]).copy()
    if "d" in found:
        return {decoded(key): decoded(one) for key, one in found["d"]}
    return _KINDS[found["k"]](**{name: decoded(one) for name, one in found["v"].items()})
