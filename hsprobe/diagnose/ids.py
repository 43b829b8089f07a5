"""The token ids of all samples of a dump, read by other processes where the engine in use has some."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from hsprobe.compare.engine import current
from hsprobe.formats.dump import Dump, Options
from hsprobe.formats.registry import open_dump
from hsprobe.formats.stored import Ints
from hsprobe.remote.location import address, locate

_ALONE = 256
"""Samples to look at before others are asked to help: most captures need no more."""
_BATCH = 64
"""Samples that a worker reads at once: many enough to be worth the way, few enough to stop in time."""


@dataclass(frozen=True)
class _Batch:
    """Some samples of a dump."""

    dump: str
    options: Options
    names: tuple[str, ...]


@dataclass(frozen=True)
class _Read:
    """Token ids of the samples of a batch, None without any, and what could not be read."""

    ids: list[Ints | None]
    skipped: list[tuple[str, str]]


def token_ids(dump: Dump, options: Options) -> Iterator[tuple[str, Ints | None]]:
    """(name, token ids or None) of each sample, in order; what cannot be read is noted in the dump.

    Args:
        options: what the dump was opened with.

    Raises:
        HsprobeError: a connection was lost, or a worker cannot reach the dump.
    """
    engine, names = current(), dump.reader.names()
    for name in islice(names, _ALONE) if engine.spread else names:
        yield name, dump.tokens(name)
    given: list[tuple[str, ...]] = []

    def batches() -> Iterator[_Batch]:
        while batch := tuple(islice(names, _BATCH)):
            given.append(batch)
            yield _Batch(address(dump.path), options, batch)

    # What this process reads of them itself, it reads from the dump that it has open.
    _opened[address(dump.path), repr(options)] = dump
    try:
        for read in engine.map(_read, batches()):
            unread = dict(read.skipped)
            for name, ids in zip(given.pop(0), read.ids, strict=True):
                # One by one: whoever asks may have enough, and then the rest was never looked at.
                if name in unread:
                    dump.skipped.append((name, unread[name]))
                yield name, ids
    finally:
        _opened.clear()


_opened: dict[tuple[str, str], Dump] = {}


def _read(batch: _Batch) -> _Read:
    """What whoever takes a batch does; a worker keeps the dump open for the next one."""
    key = batch.dump, repr(batch.options)
    if key not in _opened:
        _opened.clear()
        _opened[key] = open_dump(locate(batch.dump), batch.options)
    dump = _opened[key]
    before, dump.skipped = dump.skipped, []
    try:
        return _Read([dump.tokens(name) for name in batch.names], dump.skipped)
    finally:
        dump.skipped = before
