"""Open what was given as a side of a comparison: a trace as it is, of a dump what is needed, as a trace."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hsprobe.compare.engine import current
from hsprobe.compare.statistics import Floats
from hsprobe.diagnose.ids import token_ids
from hsprobe.diagnose.sides import open_side
from hsprobe.errors import HsprobeError
from hsprobe.formats.dump import UNKNOWN, Dump, Final, Options, Sample, Sure
from hsprobe.formats.registry import in_words, is_trace, open_dump
from hsprobe.formats.select import Needed
from hsprobe.formats.sink import Sink, default_depths, provenance
from hsprobe.remote.location import Location, identity
from hsprobe.trace.context import context_hashes
from hsprobe.trace.reader import Trace
from hsprobe.trace.writer import TraceWriter


class Told(Protocol):
    """Takes a line about what is going on; one that `stays` says what was found."""

    def __call__(self, text: str, *, stays: bool = False) -> None: ...


_SAY_EVERY = 500
_NORM_SAMPLES, _NORM_ROWS = 16, 64
# A quantized server is 5 % off; the other side of the norm is half of the state or more.
_NORM_CLOSE = 0.2


@contextmanager
def opened(
    path: Location, options: Options | None = None, *, beside: Trace | None = None, told: Told | None = None
) -> Iterator[Trace]:
    """A side of a comparison as a trace.

    Args:
        path: a trace or a dump.
        options: what the user says about a dump.
        beside: the capture to compare with; of a dump only the samples it can be compared with are read.
        told: is told what a dump was recognised as, and how far its reading is.

    Raises:
        HsprobeError: it is neither, holds no token ids, or none of its samples can be read.
    """
    if is_trace(path):
        if options not in (None, Options()):
            raise HsprobeError(
                f"{path} is a trace, which itself says what it holds.",
                "Leave out the flags that describe a dump.",
            )
        with Trace.open(path) as trace:
            yield trace
        return
    dump = open_dump(path, options)
    told = told or _untold
    told(f"{path}: {in_words(dump)}", stays=True)
    with tempfile.TemporaryDirectory(prefix="hsprobe-") as folder:
        # Named for the dump: a journal knows it again by that.
        made = Path(folder) / f"{hashlib.sha256(identity(path).encode()).hexdigest()[:16]}.h5"
        _write(dump, options or Options(), made, beside, told)
        with Trace.open(made) as trace:
            # Messages and reports name what the user gave.
            trace.path = path
            yield trace


def _untold(text: str, *, stays: bool = False) -> None:
    pass


def _write(dump: Dump, options: Options, made: Path, beside: Trace | None, told: Told) -> None:
    """The samples that are needed, as a trace, with what there is to say about them in its provenance."""
    needed = None if beside is None else _needed(dump, options, beside, told)
    facts = _Facts.of(beside)
    layout = replace(dump.layout, hidden=dump.layout.hidden or facts.hidden)
    if needed is not None and beside is not None and layout.final is not None:
        some = _samples(dump, needed.chosen()[:_NORM_SAMPLES], needed)
        layout = replace(layout, final=_final_of(some, layout.final, beside, facts.num_layers))
    dump.layout = layout
    with TraceWriter(made, {}) as writer:
        fed = layout.aux is None and facts.fed_width is not None and facts.fed_width == layout.hidden
        sink = Sink(writer, layout, facts.num_layers, facts.hidden, final_is_fed=fed)
        written, padded = 0, 0
        for sample in _samples(dump, dump.reader.names() if needed is None else needed.chosen(), needed):
            try:
                sink.add(sample)
            except HsprobeError as error:
                dump.skip(sample.name, error)
                continue
            written, padded = written + 1, padded + sample.padded
            told(f"reading {written:,} samples")
        if not written:
            raise _nothing(dump)
        sink.finish()
        known = provenance(dump, None if needed is None else needed.offered)
        known["dump"] |= {
            "read": written,
            "padded": padded,
            "scanned_all": needed is None or not needed.complete,
            "skipped": [{"sample": name, "reason": why} for name, why in dump.skipped],
            "left_out": sorted(sink.left_out),
            "default": default_depths(layout, facts.num_layers),
        }
        writer.update_provenance(known)


def _nothing(dump: Dump) -> HsprobeError:
    if dump.skipped:
        name, why = dump.skipped[0]
        return HsprobeError(
            f"None of the samples of {dump.path} ({dump.name}) can be read; the first, {name}: {why}",
            "Fetch a sound copy of the dump.",
        )
    return HsprobeError(f"{dump.path} ({dump.name}) holds no samples.", "Check the path.")


def _needed(dump: Dump, options: Options, beside: Trace, told: Told) -> Needed:
    """The samples to read. A run that continues another one takes those that it found."""
    requests = beside.requests
    needed = Needed([requests.tokens(r) for r in range(len(requests))], requests.prompt_len.tolist())

    def find() -> list[Any]:
        _offer_all(needed, dump, options, told)
        return [needed.chosen(), needed.offered, needed.complete, dump.skipped]

    names, offered, complete, skipped = current().remember(f"samples of {identity(dump.path)}", find)
    needed.settle(names, offered, complete)
    dump.skipped = [(str(name), str(why)) for name, why in skipped]
    return needed


def _offer_all(needed: Needed, dump: Dump, options: Options, told: Told) -> None:
    without = 0
    for count, (name, tokens) in enumerate(token_ids(dump, options), start=1):
        if tokens is None:
            without += 1
        else:
            needed.offer(name, tokens)
            if needed.complete:
                break
        if count % _SAY_EVERY == 0:
            told(f"looking at the token ids of {count:,} samples")
    if without and not needed.offered and not dump.skipped:
        raise HsprobeError(
            f"{dump.path} ({dump.name}) holds no token ids, so no row of it can be told from another.",
            "Name the data set that holds them with --map input_ids=NAME, or dump them too.",
        )


def _with_first_token(sample: Sample, needed: Needed | None) -> Sample:
    """The sample with the first token that its dump has lost, taken from the capture."""
    tokens = sample.tokens
    if needed is None or tokens is None or not len(tokens) or int(tokens[0]) != UNKNOWN:
        return sample
    whole = tokens.copy()
    whole[0] = needed.first_token(tokens[1:])
    return replace(sample, tokens=whole)


class _Facts:
    """What the capture says about the model that a dump does not."""

    def __init__(self, num_layers: int | None, hidden: int | None, fed_width: int | None) -> None:
        self.num_layers, self.hidden, self.fed_width = num_layers, hidden, fed_width

    @classmethod
    def of(cls, beside: Trace | None) -> _Facts:
        if beside is None:
            return cls(None, None, None)
        side = open_side(beside, "infer")
        chunked = side.chunked()
        return cls(side.num_layers, side.hidden, None if chunked is None else chunked.width)


def _samples(dump: Dump, names: Iterable[str], needed: Needed | None) -> Iterator[Sample]:
    for name in names:
        sample = dump.sample(name)
        if sample is not None:
            yield _with_first_token(sample, needed)


def _final_of(samples: Iterable[Sample], final: Final, beside: Trace, num_layers: int | None) -> Final:
    """Which side of the final norm the last states are from, told by the capture's own, where it can be."""
    if final.sure in (Sure.RECORDED, Sure.GIVEN):
        return final
    states = [found for found in map(_last_states, samples) if found is not None]
    errors = {"post": _error(states, beside, "final"), "pre": _error(states, beside, num_layers)}
    post, pre = errors["post"], errors["pre"]
    if post is not None and post < _NORM_CLOSE and (pre is None or post < pre):
        return Final("post", Sure.INFERRED)
    if pre is not None and pre < _NORM_CLOSE:
        return Final("pre", Sure.INFERRED)
    return final


def _error(states: Sequence[tuple[Any, Floats]], beside: Trace, depth: Any) -> float | None:
    """Median relative error of the last states against one depth of the capture, None without common rows."""
    lane = open_side(beside, "infer").layers.get(depth)
    if lane is None:
        return None
    contexts, rows = lane.stack.keys.by_context
    errors: list[float] = []
    for hashes, values in states:
        slots = np.minimum(np.searchsorted(contexts, hashes), len(contexts) - 1)
        hit = np.flatnonzero(contexts[slots] == hashes)
        if len(hit) and values.shape[1] == lane.width:
            theirs = lane.of(lane.stack.read(rows[slots[hit]]))
            size = np.linalg.norm(theirs, axis=1)
            with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
                errors += (np.linalg.norm(values[hit] - theirs, axis=1) / size).tolist()
    finite = [error for error in errors if np.isfinite(error)]
    return float(np.median(finite)) if finite else None


def _last_states(sample: Sample) -> tuple[Any, Floats] | None:
    """(contexts, values) of the first last states of a sample."""
    for rows in sample.rows:
        if rows.name == "final" and sample.tokens is not None and (sample.tokens >= 0).all():
            stop = rows.start + min(rows.count, _NORM_ROWS)
            hashes = np.array(context_hashes(sample.tokens[:stop].tolist()), np.uint64)[rows.start :]
            return hashes, rows.floats(0, len(hashes))
    return None
