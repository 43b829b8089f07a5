"""The first reading of a spool: its passes, and the token ids they show. Tensors are left for later."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hsprobe.capture.rows import Ints, PassRows, RequestLog
from hsprobe.capture.shown import Shown
from hsprobe.trace.blocks import Expander
from hsprobe.trace.schema import COORDS, HEALTH_CHECK_PREFIX, LAYERS, NOT_JOINED, SIZES, Model
from hsprobe.trace.spool import Record, SpoolReader

MALFORMED = (ValueError, KeyError, TypeError, IndexError, OverflowError)
"""What a malformed record raises when it is taken apart."""
RANGES_SHOWN = 8
_SETTLED = ("idle", "bye")
# Passes of a server that was started anew must not look like those of the one before.
_RUN = 1 << 40


@dataclass(frozen=True)
class Gap:
    """Something that was not recorded, and why."""

    reason: str
    site: str | None = None
    depth: int | str | None = None
    number: int | None = None


@dataclass
class Missing:
    """Passes left out for one reason."""

    passes: int = 0
    ranges: list[tuple[int, int]] = field(default_factory=list)

    def add(self, header: dict[str, Any]) -> None:
        """Add what one record says."""
        self.passes += int(header["passes"])
        self.ranges += [(int(first), int(last)) for first, last in header["ranges"]]

    def gap(self, reason: str) -> Gap:
        """As one gap, which names the passes as far as they were listed."""
        named = [f"{first}" if first == last else f"{first}-{last}" for first, last in self.ranges]
        more = ", ..." if len(named) > RANGES_SHOWN else ""
        which = ", ".join(named[:RANGES_SHOWN]) + more
        text = f"{self.passes} {'pass' if self.passes == 1 else 'passes'} not recorded ({which}): {reason}"
        return Gap(text, number=self.ranges[0][0] if self.ranges else None)


@dataclass
class Segment:
    """What one process recorded: a spool, or the part of it that begins with a "hello".

    Attributes:
        start, end: file offsets of its records.
        rank: its number in the trace; -1 until `number_ranks`.
        run: counts the processes that were this rank before it, in this folder of spools.
        passes: by number, in the order in which they ran.
        logs: token ids by request id.
        finished: whether the process said that it had written all it recorded, and came to the end of it.
        torn: whether the spool breaks off here.
        row_of: pass number -> [T] row of the trace that each row of the pass became, -1 for none.
        not_joined: numbers of passes whose labels contradict those of another rank.
        shown: site -> the last word on what its probe has shown of itself.
        refuted: sites whose probes were shown to misread: what they recorded is left out.
    """

    path: Path
    start: int
    hello: dict[str, Any]
    end: int = 0
    rank: int = -1
    run: int = 0
    passes: dict[int, PassRows] = field(default_factory=dict)
    logs: dict[str, RequestLog] = field(default_factory=dict)
    gaps: list[Gap] = field(default_factory=list)
    finished: bool = True
    torn: bool = False
    row_of: dict[int, Ints] = field(default_factory=dict)
    not_joined: set[int] = field(default_factory=set)
    shown: dict[str, Shown] = field(default_factory=dict)
    refuted: set[str] = field(default_factory=set)
    missing: dict[str, Missing] = field(default_factory=dict)
    _expander: Expander = field(default_factory=Expander)

    @property
    def coords(self) -> dict[str, int]:
        """Place of the process in each kind of parallelism, the sizes of these, and the layers it runs."""
        names = (*COORDS, *SIZES, *LAYERS)
        return {name: self.hello[name] for name in names if isinstance(self.hello.get(name), int)}

    def pass_id(self, number: int) -> int:
        """Id that a pass has in the trace."""
        if number in self.not_joined:
            return NOT_JOINED
        return self.passes[number].nth + self.run * _RUN

    def records(self) -> Iterator[Record]:
        """Its records, read again, those of graphs taken apart."""
        expander = Expander()
        for record in SpoolReader(self.path, self.start):
            if record.end > self.end:
                return
            try:
                yield from expander.expand(record)
            except MALFORMED:
                continue  # the first reading has noted it

    def read(self, record: Record) -> None:
        """Note one record of the first reading."""
        self.end = record.end
        try:
            for one in self._expander.expand(record):
                self.take(one)
        except MALFORMED as error:
            self.gaps.append(Gap(f"a {record.kind} record is malformed: {error}"))

    def take(self, record: Record) -> None:
        """Note one ordinary record."""
        if record.kind in ("pass", "tensor"):
            self.finished = False
        elif record.kind in _SETTLED:
            # A process that stands still has written all, too, but not come to the end of its requests.
            self.finished = not record.header.get("running")
        try:
            if record.kind == "request":
                self._log(str(record.header["rid"])).set_prompt([int(i) for i in record.header["origin_ids"]])
            elif record.kind == "pass":
                self._take_pass(PassRows.parse(record.header, record.payload))
            elif record.kind == "graph":
                number = record.header["pass"]
                self.passes[number] = replace(self.passes[number], graph=True)
            elif record.kind == "padding":
                number = record.header["pass"]
                self.passes[number] = self.passes[number].padded(int(record.header["rows"]))
            elif record.kind == "finished":
                self._log(str(record.header["rid"])).set_answer([int(i) for i in record.header["output_ids"]])
            elif record.kind == "gap":
                self.gaps.append(_gap(record.header))
            elif record.kind == "proof":
                self._take_proof(record.header)
            elif record.kind == "missing":
                self.missing.setdefault(str(record.header["reason"]), Missing()).add(record.header)
        except MALFORMED as error:
            self.gaps.append(Gap(f"a {record.kind} record is malformed: {error}"))

    def _take_proof(self, header: dict[str, Any]) -> None:
        site = str(header["site"])
        self.shown[site] = Shown(str(header["state"]), str(header["why"]))
        if header.get("refuted"):
            self.refuted.add(site)

    def _take_pass(self, one: PassRows) -> None:
        if one.number in self.passes:
            raise ValueError(f"there are two passes {one.number}")
        self.passes[one.number] = one
        if one.model == Model.TARGET:
            for block in one.blocks():
                self._log(block.rid).see(one.phase, block)

    def _log(self, rid: str) -> RequestLog:
        if rid.startswith(HEALTH_CHECK_PREFIX):
            return RequestLog()
        return self.logs.setdefault(rid, RequestLog())

    def close(self, torn: bool) -> None:
        """There is no further record."""
        self.torn = torn
        self.gaps += [missing.gap(reason) for reason, missing in self.missing.items()]
        last = max(self.passes, default=None)
        if torn:
            self.gaps.append(
                Gap("the spool breaks off in the middle of a record; what follows is lost", number=last)
            )
        elif not self.finished:
            self.gaps.append(
                Gap(
                    "the process ended, or stood still, before its requests were done",
                    number=last,
                )
            )


def read_segments(path: Path, start: int) -> list[Segment]:
    """Read the passes of a spool from an offset on; each further "hello" is a process that began anew.

    Raises:
        HsprobeError: the file cannot be read or is no spool.
    """
    reader = SpoolReader(path, start)
    segment = Segment(path, start, _first_hello(path) if start else {}, end=start)
    segments = [segment]
    begun = start > 0
    for record in reader:
        if record.kind == "hello":
            if begun:
                segment.close(torn=False)
                segment = Segment(path, segment.end, record.header)
                segments.append(segment)
            segment.hello = record.header
            begun = True
        segment.read(record)
    segment.close(reader.torn)
    return segments


def number_ranks(segments: Sequence[Segment]) -> None:
    """Number the processes that recorded a pass, by their own rank where that is free."""
    used: set[int] = set()
    runs: Counter[int] = Counter()
    for segment in segments:
        wanted = segment.hello.get("rank")
        rank = own = wanted if isinstance(wanted, int) and wanted >= 0 else 0
        if segment.passes:
            while rank in used:
                rank += 1
            used.add(rank)
            segment.run = runs[own]
            runs[own] += 1
        segment.rank = rank


def _first_hello(path: Path) -> dict[str, Any]:
    first = next(iter(SpoolReader(path)), None)
    return first.header if first is not None and first.kind == "hello" else {}


def _gap(header: dict[str, Any]) -> Gap:
    site, depth, number = header.get("site"), header.get("depth"), header.get("pass")
    return Gap(
        str(header["reason"]),
        site=None if site is None else str(site),
        depth=depth if isinstance(depth, (int, str)) else None,
        number=number if isinstance(number, int) else None,
    )
