"""Figures behind a report: which depth is which, errors by position, the worst rows, both origins.

Shapes: n rows, H channels.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from hsprobe.compare.align import Pairs, pair
from hsprobe.compare.direct import Lane
from hsprobe.compare.direct import errors as row_errors_of
from hsprobe.compare.noise import Level
from hsprobe.compare.stack import Rows, spread
from hsprobe.compare.statistics import Floats
from hsprobe.diagnose.identify import Candidate, Label, identify, matrix
from hsprobe.diagnose.model import Depth, Report
from hsprobe.diagnose.naming import phase_name
from hsprobe.diagnose.sides import Side, chunk_lanes, depth_candidates, open_side
from hsprobe.trace.reader import Trace

_IDENTIFY_ROWS, _MOST_PAIRS = 256, 20_000
_BINS, _WORST, _AROUND = 48, 25, 3


@dataclass(frozen=True)
class HeatRow:
    """One tensor against every depth.

    Attributes:
        name: `served chunk 0`. group: "trained", "served" or "stream". expected: the depth it should be.
        errors: median row error at each depth of the map, None without rows.
    """

    name: str
    group: str
    expected: Depth
    errors: list[float | None]


@dataclass(frozen=True)
class PositionBin:
    """Rows of one chunk and phase at neighbouring positions: how many, their median and largest error."""

    chunk: int
    phase: str
    position: int
    rows: int
    error: float
    worst: float


@dataclass(frozen=True)
class WorstRow:
    """A row with a large error, and the token ids of its request around it, from position `start` on."""

    chunk: int
    phase: str
    request: str
    position: int
    token: int
    start: int
    around: list[int]
    error: float


@dataclass(frozen=True)
class Origin:
    """One entry of the provenance on both sides; None where a side lacks it."""

    key: str
    train: str | None
    infer: str | None
    differs: bool


@dataclass(frozen=True)
class Detail:
    """Everything to look at beside a `Report`; `depths` are the columns of the heatmap."""

    depths: list[Depth]
    heatmap: list[HeatRow]
    positions: list[PositionBin]
    worst: list[WorstRow]
    origins: list[Origin]


def detail(report: Report) -> Detail:
    """Look closer at the two traces that a report is about.

    Raises:
        HsprobeError: one of them can no longer be read.
    """
    with Trace.open(report.train.path) as one, Trace.open(report.infer.path) as two:
        train, infer = open_side(one, "train"), open_side(two, "infer")
        depths, heatmap = _heatmap(report, train, infer)
        positions: list[PositionBin] = []
        worst: list[WorstRow] = []
        for chunk, left, right in _compared(report, train, infer):
            pairs, errors = _errors(left, right)
            positions += _bins(chunk, left, pairs, errors)
            worst += _worst(chunk, left, pairs, errors, two)
        return Detail(depths, heatmap, positions, worst, origins(one.provenance, two.provenance))


def _heatmap(report: Report, train: Side, infer: Side) -> tuple[list[Depth], list[HeatRow]]:
    """Trained and served chunks against the depths captured; of a whole model, its depths against those."""
    candidates = depth_candidates(infer) or depth_candidates(train)
    found: set[Depth] = {c.label.depth if c.label.kind == "depth" else "final" for c in candidates}
    depths = sorted(found, key=_order)
    labels = [Label.of(depth) for depth in depths]
    trained = {line.index: line.trained for line in report.chunks}
    rows = []
    for side, group in ((train, "trained"), (infer, "served")):
        lanes = chunk_lanes(side.chunked(), side.hidden)
        for k, errors in enumerate(_against(lanes, candidates, labels)):
            rows.append(HeatRow(f"{group} chunk {k}", group, trained.get(k), errors))
    if train.layers and infer.layers:
        ours = [Candidate(Label.of(depth), lane) for depth, lane in infer.layers.items()]
        for depth in sorted(train.layers, key=_order):
            (errors,) = _against([train.layers[depth]], ours, labels)
            rows.append(HeatRow(f"trained depth {depth}", "stream", depth, errors))
    return depths, rows


def _order(depth: Depth) -> int:
    return depth if isinstance(depth, int) else 1 << 30


def _against(
    lanes: list[Lane], candidates: list[Candidate], labels: list[Label]
) -> Iterator[list[float | None]]:
    if not lanes or not candidates:
        return
    keys = lanes[0].stack.keys
    table = matrix(lanes, candidates, spread(keys.usable, keys, _IDENTIFY_ROWS))
    for errors in table.errors:
        found = identify(errors, table.labels(), Level(0.0)).errors
        yield [found.get(label) for label in labels]


def _compared(report: Report, train: Side, infer: Side) -> Iterator[tuple[int, Lane, Lane]]:
    """(chunk, served lane, training lane) of every chunk that has a partner."""
    served = chunk_lanes(infer.chunked(), infer.hidden)
    trained = chunk_lanes(train.chunked(), train.hidden)
    for line in report.chunks:
        right = trained[line.index] if line.index < len(trained) else train.layers.get(line.trained)
        if right is not None and line.index < len(served):
            yield line.index, served[line.index], right


def _errors(left: Lane, right: Lane) -> tuple[Pairs, Floats]:
    """Row errors of at most `_MOST_PAIRS` pairs, evenly spread, NaN where a side is not finite."""
    pairs = pair(left.stack, right.stack)
    if len(pairs) > _MOST_PAIRS:
        some = np.linspace(0, len(pairs) - 1, _MOST_PAIRS).astype(np.int64)
        pairs = Pairs(pairs.left[some], pairs.right[some])
    errors = row_errors_of(left, right, pairs) if len(pairs) else np.zeros(0, np.float32)
    return pairs, errors


def _bins(chunk: int, left: Lane, pairs: Pairs, errors: Floats) -> Iterator[PositionBin]:
    keys = left.stack.keys
    good = np.isfinite(errors)
    rows, values = pairs.left[good], errors[good]
    if not len(rows):
        return
    width = int(keys.position[rows].max()) // _BINS + 1
    places = list(zip(keys.phase[rows].tolist(), (keys.position[rows] // width).tolist(), strict=True))
    order = sorted(range(len(rows)), key=lambda i: places[i])
    for (phase, at), members in groupby(order, key=lambda i: places[i]):
        here = values[list(members)]
        yield PositionBin(
            chunk, phase_name(phase), at * width, len(here), float(np.median(here)), float(here.max())
        )


def _worst(chunk: int, left: Lane, pairs: Pairs, errors: Floats, trace: Trace) -> Iterator[WorstRow]:
    keys, requests = left.stack.keys, trace.requests
    ranked: Rows = np.argsort(-np.nan_to_num(errors, nan=np.inf), kind="stable")[:_WORST]
    for index in ranked.tolist():
        row = int(pairs.left[index])
        request, position = int(keys.request[row]), int(keys.position[row])
        start = max(0, position - _AROUND)
        known = 0 <= request < len(requests.ids)
        yield WorstRow(
            chunk=chunk,
            phase=phase_name(int(keys.phase[row])),
            request=str(requests.ids[request]) if known else "unknown",
            position=position,
            token=int(keys.token[row]),
            start=start,
            around=[int(t) for t in requests.tokens(request)[start : position + 2]] if known else [],
            error=float(errors[index]),
        )


def origins(train: dict[str, Any], infer: dict[str, Any]) -> list[Origin]:
    """The provenance of both sides, entry by entry; per-request facts are left out."""
    one, two = dict(_flat(train)), dict(_flat(infer))
    keys = sorted({*one, *two}, key=lambda key: (key.count("."), key))
    return [Origin(key, one.get(key), two.get(key), one.get(key) != two.get(key)) for key in keys]


def _flat(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, item in value.items():
        if isinstance(item, dict) and item:
            yield from _flat(item, f"{prefix}{key}.")
        elif not (isinstance(item, list) and any(isinstance(part, dict) for part in item)):
            yield f"{prefix}{key}", item if isinstance(item, str) else json.dumps(item)
