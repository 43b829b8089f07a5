"""Turns the spools of a server's processes into one trace, also after a crash.

Each spool is read twice: first for its passes, whose rows can be labelled only when all are known, then for
its tensors, of which one record at a time is in memory.

Letters: n rows of a tensor record, W its width.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hsprobe.capture.joining import join_passes
from hsprobe.capture.rows import (
    Ints,
    KnownRequest,
    Labeller,
    PassRows,
    RequestTokens,
    settle_request,
)
from hsprobe.capture.segments import MALFORMED, Gap, Segment, number_ranks, read_segments
from hsprobe.capture.shown import joined
from hsprobe.errors import HsprobeError
from hsprobe.trace import schema
from hsprobe.trace.spool import Record
from hsprobe.trace.writer import TraceWriter

__all__ = ["AssembleSummary", "RequestTokens", "assemble"]

_LEFT_OUT = -1
_ROWS_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class AssembleSummary:
    """What a trace holds.

    Attributes:
        path: the trace.
        state: "complete", or "recovered" when a process did not finish what it was writing.
        ranks: processes that recorded a pass.
        passes, rows: over all ranks.
        tensor_rows: rows of all tensors over all ranks.
        tensors: names of the tensors.
        requests: how many.
        dropped_rows: rows of the server's own health checks, left out.
        gaps: how many kinds of things are missing.
        torn: spools that end in a broken record.
    """

    path: Path
    state: str
    ranks: int
    passes: int
    rows: int
    tensor_rows: int
    tensors: tuple[str, ...]
    requests: int
    dropped_rows: int
    gaps: int
    torn: tuple[Path, ...]


class _Gaps:
    """What is missing, each kind once, with how often."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._found: dict[tuple[Any, ...], tuple[Gap, int]] = {}
        self._passes = {segment.rank: segment for segment in segments if segment.passes}

    def add(self, rank: int, gap: Gap) -> None:
        key = (rank, gap.reason, gap.site, gap.depth)
        first, count = self._found.get(key, (gap, 0))
        self._found[key] = first, count + 1

    def listed(self) -> list[dict[str, Any]]:
        """As `/gaps` holds them; `pass` is the first one that the gap was seen in."""
        return [
            {
                "rank": rank,
                "site": gap.site,
                "depth": gap.depth,
                "pass": self._id(rank, gap.number),
                "reason": gap.reason if count == 1 else f"{gap.reason} ({count} times)",
            }
            for (rank, *_), (gap, count) in self._found.items()
        ]

    def _id(self, rank: int, number: int | None) -> int | None:
        segment = self._passes.get(rank)
        if number is None or segment is None or number not in segment.passes:
            return number
        return segment.passes[number].nth


def assemble(
    spools: Sequence[Path],
    out: Path,
    *,
    provenance: Mapping[str, Any],
    requests: Mapping[str, RequestTokens] | None = None,
    start_offsets: Mapping[Path, int] | None = None,
) -> AssembleSummary:
    """Write the trace of a capture.

    Args:
        spools: one a process. A spool that ends in the middle of a record counts up to there.
        out: the trace to write.
        provenance: what the caller knows; laid over what the first process said of itself.
        requests: what the client knows of its requests, by request id. The token ids of other requests are
            taken from the passes.
        start_offsets: where in each spool this capture begins, for a server that ran before it.

    Raises:
        HsprobeError: there is no spool, one cannot be read, or the trace cannot be written.
    """
    if not spools:
        raise HsprobeError(
            "The server recorded nothing: there is no spool.",
            "Check that hsprobe is installed in the Python environment that runs the server.",
        )
    starts = start_offsets or {}
    segments = [segment for path in spools for segment in read_segments(path, starts.get(path, 0))]
    number_ranks(segments)
    gaps = _gaps_of(segments)
    known = _settle(segments, requests or {}, gaps)
    complete = all(segment.finished and not segment.torn for segment in segments)
    state = schema.STATE_COMPLETE if complete else schema.STATE_RECOVERED
    tensor_rows: Counter[str] = Counter()
    with TraceWriter(out, _provenance(segments, provenance)) as writer:
        writer.set_requests(
            list(known),
            [request.ids[: request.final_len] for request in known.values()],
            [request.prompt_len for request in known.values()],
        )
        for segment in filter(lambda one: one.passes, segments):
            writer.add_rank(segment.rank, segment.coords)
            _write_rows(writer, segment, known)
            tensor_rows.update(_write_tensors(writer, segment, gaps))
            writer.finish_rank(segment.rank)
        writer.set_gaps(gaps.listed())
        writer.close(state)
    return _summary(out, state, segments, tensor_rows, len(known), len(gaps.listed()))


def _gaps_of(segments: Sequence[Segment]) -> _Gaps:
    """What the processes say they lack, and what each lacks beside the others."""
    gaps = _Gaps(segments)
    for segment in segments:
        for gap in segment.gaps:
            gaps.add(segment.rank, gap)
    for rank, gap in join_passes(segments):
        gaps.add(rank, gap)
    return gaps


def _summary(
    out: Path, state: str, segments: Sequence[Segment], tensor_rows: Counter[str], requests: int, gaps: int
) -> AssembleSummary:
    rows = [row_of for segment in segments for row_of in segment.row_of.values()]
    return AssembleSummary(
        path=out,
        state=state,
        ranks=sum(bool(segment.passes) for segment in segments),
        passes=sum(bool((row_of != _LEFT_OUT).any()) for row_of in rows),
        rows=sum(int((row_of != _LEFT_OUT).sum()) for row_of in rows),
        tensor_rows=tensor_rows.total(),
        tensors=tuple(sorted(tensor_rows)),
        requests=requests,
        dropped_rows=sum(int((row_of == _LEFT_OUT).sum()) for row_of in rows),
        gaps=gaps,
        torn=tuple(dict.fromkeys(segment.path for segment in segments if segment.torn)),
    )


def _settle(
    segments: Sequence[Segment], requests: Mapping[str, RequestTokens], gaps: _Gaps
) -> dict[str, KnownRequest]:
    """Every request by id: the client's first, in its order, then others as they came."""
    known = {}
    for rid in dict.fromkeys([*requests, *(rid for segment in segments for rid in segment.logs)]):
        logs = [(segment.rank, segment.logs[rid]) for segment in segments if rid in segment.logs]
        known[rid] = settle_request([log for _, log in logs], requests.get(rid))
        if known[rid].note:
            gaps.add(logs[0][0], Gap(f"request {rid}: {known[rid].note}"))
    return known


def _provenance(segments: Sequence[Segment], given: Mapping[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = {}
    # Only the last stage of a pipeline knows the draft and the chunks: what one lacks, another tells.
    for segment in segments:
        said = segment.hello.get("provenance")
        told = _merged(said, told) if isinstance(said, dict) else told
    shown = joined([(segment.rank, segment.shown) for segment in segments])
    if shown:
        told["self_test"] = shown
    return _merged(told, given)


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            value = _merged(old, value)
        if value is not None or key not in merged:
            merged[key] = value
    return merged


def _write_rows(writer: TraceWriter, segment: Segment, known: Mapping[str, KnownRequest]) -> None:
    labeller = Labeller(known, {rid: number for number, rid in enumerate(known)})
    kept_passes: list[PassRows] = []
    waiting: list[dict[str, npt.NDArray[Any]]] = []
    n_rows = n_waiting = 0
    for one in segment.passes.values():
        kept = one.kept()
        labels = labeller.label(one)
        segment.row_of[one.number] = np.where(kept, n_rows + np.cumsum(kept) - 1, _LEFT_OUT)
        n_kept = int(kept.sum())
        if not n_kept:
            continue
        columns = {
            "pass": np.full(n_kept, len(kept_passes)),
            "request": labels.request[kept],
            "position": one.positions[kept],
            "token": one.tokens[kept],
            "context": labels.context[kept],
            "status": labels.status[kept],
        }
        kept_passes.append(one)
        waiting.append(columns)
        n_rows, n_waiting = n_rows + n_kept, n_waiting + n_kept
        if n_waiting >= _ROWS_AT_ONCE:
            writer.append_rows(segment.rank, _stacked(waiting))
            waiting, n_waiting = [], 0
    if waiting:
        writer.append_rows(segment.rank, _stacked(waiting))
    writer.add_passes(segment.rank, _pass_columns(kept_passes, segment))


def _stacked(tables: list[dict[str, npt.NDArray[Any]]]) -> dict[str, npt.NDArray[Any]]:
    return {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}


def _pass_columns(passes: list[PassRows], segment: Segment) -> dict[str, list[Any]]:
    return {
        "id": [segment.pass_id(one.number) for one in passes],
        "model": [one.model for one in passes],
        "phase": [one.phase for one in passes],
        "mode": [one.mode for one in passes],
        "n_rows": [int((segment.row_of[one.number] != _LEFT_OUT).sum()) for one in passes],
        "time": [one.time for one in passes],
        "graph": [int(one.graph) for one in passes],
    }


def _write_tensors(writer: TraceWriter, segment: Segment, gaps: _Gaps) -> Counter[str]:
    """Second reading of a spool; returns how many rows each tensor got."""
    rows: Counter[str] = Counter()
    for record in segment.records():
        header = record.header
        if record.kind != "tensor" or header.get("site") in segment.refuted:
            continue
        try:
            rows[str(header["name"])] += _write_tensor(writer, segment, record, gaps)
        except MALFORMED as error:
            gaps.add(segment.rank, _gap_at(header, f"a tensor record was left out: {error}"))
    return rows


def _write_tensor(writer: TraceWriter, segment: Segment, record: Record, gaps: _Gaps) -> int:
    header = record.header
    one = segment.passes.get(header["pass"])
    if one is None:
        raise ValueError("its pass was not recorded")
    site, dtype = header["site"], str(header["dtype"])
    if not isinstance(site, str):
        raise ValueError("it names no site")
    if dtype not in schema.STORAGE:
        raise ValueError(f"its dtype {dtype} is not known")
    n, width = (int(size) for size in header["shape"])
    if min(n, width) < 0 or math.prod((n, width, schema.ITEM_SIZE[dtype])) != len(record.payload):
        raise ValueError(f"{len(record.payload)} bytes for {n} x {width} of {dtype}")
    rows = _rows_of(header["rows"], n, one)
    if n > len(rows):
        gaps.add(segment.rank, _gap_at(header, "rows beyond those of the pass were left out"))
    target = segment.row_of[one.number][rows]
    data = np.frombuffer(record.payload, schema.STORAGE[dtype]).reshape(n, width)[: len(rows)]
    kept = target != _LEFT_OUT
    if not kept.any():
        return 0
    writer.append(
        segment.rank,
        str(header["name"]),
        data if kept.all() else data[kept],
        target[kept],
        site=site,
        dtype=dtype,
        depth=header.get("depth"),
        depths=header.get("depths"),
        chunks=header.get("chunks"),
        spread=_spread(header),
    )
    return int(kept.sum())


def _spread(header: Mapping[str, Any]) -> str | None:
    if header.get("slice"):
        return schema.SPREAD_ATTN_TP
    return schema.SPREAD_COLUMNS if header.get("spread") == schema.SPREAD_COLUMNS else None


def _rows_of(rows: Any, n: int, one: PassRows) -> Ints:
    """Rows of the pass that the rows of a tensor are.

    Raises:
        ValueError: there are fewer rows of data than rows of the pass to be, or a row is not in the pass.
    """
    n_rows = len(one.tokens)
    if rows is None:
        index = np.arange(n_rows)
    elif rows == "last":
        index = one.last_rows()
    elif isinstance(rows, dict):
        first, count = int(rows["first"]), int(rows["count"])
        if not 0 <= first <= first + count <= n_rows:
            raise ValueError(f"rows {first} to {first + count} of a pass of {n_rows}")
        index = np.arange(first, first + count)
    else:
        index = np.array(rows, np.int64)
    if n < len(index):
        raise ValueError(f"it has {n} rows for {len(index)} rows of the pass")
    if len(index) and not (index.min() >= 0 and index.max() < n_rows):
        raise ValueError(f"a row lies outside the {n_rows} rows of the pass")
    return index


def _gap_at(header: Mapping[str, Any], reason: str) -> Gap:
    site, depth, number = header.get("site"), header.get("depth"), header.get("pass")
    return Gap(
        f"{header.get('name')}: {reason}",
        site=None if site is None else str(site),
        depth=depth if isinstance(depth, (int, str)) else None,
        number=number if isinstance(number, int) else None,
    )
