"""Turn a dump into a trace, or dumps and traces into safetensors: sample by sample, to be continued if
interrupted.

A trace is made in parts, each a trace of its own in `<DST>.parts`, which are put together at the end; of an
interrupted run the finished parts are kept.
"""

from __future__ import annotations

import json
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Self

from hsprobe.errors import HsprobeError
from hsprobe.formats.dump import Dump
from hsprobe.formats.sink import Sink, default_depths, provenance
from hsprobe.remote.location import identity
from hsprobe.trace.reader import Trace
from hsprobe.trace.schema import PASS_COLUMNS, ROW_COLUMNS
from hsprobe.trace.tensor import Tensor
from hsprobe.trace.writer import TraceWriter

PART_BYTES = 256 << 20
PART_SAMPLES = 4096
_BLOCK_ROWS = 4096
Told = Callable[[int, int], None]
"""Is told how many samples are done, and of how many."""


@dataclass
class Outcome:
    """What became of a conversion.

    Attributes:
        samples, rows: written. kept: how many of the samples an earlier, interrupted run had written.
        skipped: (sample, why) for those that could not be read.
        left_out: tensors that could not be labelled.
    """

    samples: int = 0
    rows: int = 0
    kept: int = 0
    skipped: list[tuple[str, str]] = field(default_factory=list)
    left_out: set[str] = field(default_factory=set)


def to_trace(dump: Dump, out: Path, *, num_layers: int | None = None, told: Told | None = None) -> Outcome:
    """Write a dump as a trace.

    Args:
        out: the trace; an older file there is replaced at the end.
        num_layers: L of the target, to label a last state from before the final norm.

    Raises:
        HsprobeError: nothing of the dump can be read, or an interrupted run was of something else.
        KeyboardInterrupt: interrupted; what was done is kept, and the next run goes on from there.
    """
    return _ToTrace(dump, out, num_layers, told or (lambda done, total: None)).run()


class _ToTrace:
    def __init__(self, dump: Dump, out: Path, num_layers: int | None, told: Told) -> None:
        self.dump, self.out, self.num_layers, self.told = dump, out, num_layers, told
        self.folder = out.with_name(f"{out.name}.parts")
        self.total = sum(1 for _ in dump.reader.names())
        self.done = 0
        self.outcome = Outcome()
        self.known: dict[str, tuple[int, str]] = {}

    def run(self) -> Outcome:
        self._start()
        parts = self._earlier()
        names = islice(self.dump.reader.names(), self.done, None)
        while self.done < self.total:
            part = self.folder / f"part-{len(parts):05d}.h5"
            if not self._write_part(part, names):
                break
            parts.append(part)
        if not self.outcome.samples:
            shutil.rmtree(self.folder)
            raise _nothing(self.dump)
        self._join(parts)
        shutil.rmtree(self.folder)
        return self.outcome

    # What was being converted, so that an interrupted run is not continued with something else.

    def _start(self) -> None:
        mark = {
            "dump": identity(self.dump.path),
            "format": self.dump.key,
            "samples": self.total,
            "layout": repr(self.dump.layout.aux and self.dump.layout.aux.depths),
            "num_layers": self.num_layers,
        }
        place = self.folder / "conversion.json"
        try:
            self.folder.mkdir(exist_ok=True)
            if place.exists() and json.loads(place.read_text()) != mark:
                raise HsprobeError(
                    f"{self.folder} is left from converting something else, or the dump has changed.",
                    "Remove that folder, and convert again.",
                )
            place.write_text(json.dumps(mark))
        except (OSError, ValueError) as error:
            raise HsprobeError(
                f"{self.folder} cannot be used: {error}.", "Give another place to write to."
            ) from error

    def _earlier(self) -> list[Path]:
        """Finished parts of an earlier run, in order."""
        found: list[Path] = []
        while (part := self.folder / f"part-{len(found):05d}.h5").exists():
            with Trace.open(part) as trace:
                about = trace.provenance["part"]
                self.done += int(about["names"])
                self.outcome.samples += len(trace.requests)
                self.outcome.rows += int(about["rows"])
                self.outcome.skipped += [(str(name), str(why)) for name, why in about["skipped"]]
                self.outcome.left_out |= set(map(str, about["left_out"]))
                for name, tensor in trace.ranks[0].tensors.items():
                    self.known[name] = (tensor.shape[1], tensor.dtype)
            found.append(part)
        self.outcome.kept = self.outcome.samples
        return found

    def _write_part(self, part: Path, names: Iterator[str]) -> bool:
        """The next samples, as many as fit a part; whether any could be read."""
        looked = 0
        with TraceWriter(part, {}) as writer:
            sink = Sink(writer, self.dump.layout, self.num_layers, known=self.known)
            with _Patient() as patient:
                for name in names:
                    looked += 1
                    self._add(sink, name)
                    self.told(self.done + looked, self.total)
                    if patient.asked or sink.bytes >= PART_BYTES or sink.samples >= PART_SAMPLES:
                        break
                self._close(sink, writer, looked)
            if patient.asked:
                raise KeyboardInterrupt
        self.done += looked
        self.outcome.samples += sink.samples
        self.outcome.rows += sink.rows
        return looked > 0

    def _add(self, sink: Sink, name: str) -> None:
        sample = self.dump.sample(name)
        if sample is None:
            return
        try:
            sink.add(sample)
        except HsprobeError as error:
            self.dump.skip(name, error)

    def _close(self, sink: Sink, writer: TraceWriter, looked: int) -> None:
        sink.finish()
        skipped, self.dump.skipped = self.dump.skipped, []
        self.outcome.skipped += skipped
        self.outcome.left_out |= sink.left_out
        writer.update_provenance(
            {
                "part": {
                    "names": looked,
                    "rows": sink.rows,
                    "skipped": skipped,
                    "left_out": sorted(sink.left_out),
                }
            }
        )
        writer.close()

    def _join(self, parts: list[Path]) -> None:
        known = provenance(self.dump, self.total)
        known["dump"] |= {
            "read": self.outcome.samples,
            "skipped": [{"sample": name, "reason": why} for name, why in self.outcome.skipped],
            "left_out": sorted(self.outcome.left_out),
            "default": default_depths(self.dump.layout, self.num_layers),
        }
        if self.num_layers is not None:
            known["model"]["num_layers"] = self.num_layers
        with TraceWriter(self.out, known) as writer:
            writer.add_rank(0, {})
            joined = _Joined(writer)
            for part in parts:
                with Trace.open(part) as trace:
                    joined.add(trace)
            joined.finish()


class _Patient:
    """Lets the sample under way be finished before an interruption; a second one is obeyed at once."""

    asked = False

    def __enter__(self) -> Self:
        self._before = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(self, *trouble: object) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._before)

    def _ask(self, number: int, frame: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


class _Joined:
    """Parts put together in one trace."""

    def __init__(self, writer: TraceWriter) -> None:
        self.writer = writer
        self.ids: list[str] = []
        self.tokens: list[Any] = []

    def add(self, trace: Trace) -> None:
        rank = trace.ranks[0]
        passes = {name: rank.passes[name] for name in PASS_COLUMNS}
        passes["id"] = passes["id"] + len(self.ids)
        first_pass = self.writer.add_passes(0, passes)
        rows = {name: rank.rows[name] for name in ROW_COLUMNS}
        rows["pass"] = rows["pass"] + first_pass
        rows["request"] = rows["request"] + len(self.ids)
        first = self.writer.append_rows(0, rows)
        for tensor in rank.tensors.values():
            self._copy(tensor, first)
        self.ids += trace.requests.ids
        self.tokens += [trace.requests.tokens(r) for r in range(len(trace.requests))]

    def _copy(self, tensor: Tensor, first: int) -> None:
        for low in range(0, len(tensor), _BLOCK_ROWS):
            block = slice(low, min(low + _BLOCK_ROWS, len(tensor)))
            self.writer.append(
                0,
                tensor.name,
                tensor.read_raw(block),
                tensor.row_index[block] + first,
                site=tensor.site,
                dtype=tensor.dtype,
                depth=tensor.depth,
                depths=tensor.depths,
                chunks=tensor.chunks,
            )

    def finish(self) -> None:
        self.writer.set_requests(self.ids, self.tokens, [len(one) for one in self.tokens])


def _nothing(dump: Dump) -> HsprobeError:
    if dump.skipped:
        return HsprobeError(
            f"No sample of {dump.path} ({dump.name}) can be read; the first: {dump.skipped[0][1]}",
            "Fetch a sound copy of the dump.",
        )
    return HsprobeError(f"{dump.path} ({dump.name}) holds no samples.", "Check the path.")
