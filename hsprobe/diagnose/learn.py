"""Measure the noise between two benign captures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from hsprobe.compare.direct import Lane, compare_many
from hsprobe.compare.noise import Noise
from hsprobe.compare.shards import Limits
from hsprobe.compare.stack import Stack
from hsprobe.compare.statistics import ErrorStats
from hsprobe.compare.tolerance import MIN_ROWS, SAFETY, Figure, Tolerance, pair_of
from hsprobe.diagnose.dumped import Told, opened
from hsprobe.diagnose.evidence import Serving
from hsprobe.diagnose.model import Depth
from hsprobe.diagnose.naming import depth_name, phase_name, plural
from hsprobe.diagnose.ranks.facts import RankFacts
from hsprobe.diagnose.ranks.survey import Survey
from hsprobe.diagnose.sides import (
    Side,
    check_same_model,
    chunk_lanes,
    dtypes_between,
    served_depths,
)
from hsprobe.errors import HsprobeError
from hsprobe.formats.dump import Options
from hsprobe.remote.location import Location, locate

# Rounding, however coarse, does not turn half of a state into something else; another layer does.
_NOT_NOISE = 0.5
# So far above the model that the person who will rely on it should look.
_REMARKABLE = 10.0


@dataclass(frozen=True)
class Learned:
    """A tolerance, and what is to be said about it.

    Attributes:
        model: the noise model, to set the figures beside.
        notes: what was left out, and what is remarkable.
    """

    tolerance: Tolerance
    model: Noise
    notes: list[str]


def learn(
    first: Location | str,
    second: Location | str,
    *,
    safety: float = SAFETY,
    dump: Options | None = None,
    told: Told | None = None,
) -> Learned:
    """Measure how far two benign captures of one model are apart.

    Of ranks that hold the same rows one is measured, once it is known that they do; columns or rows that
    ranks share out are put together first, as `hsprobe.diagnose.diff` does it.

    Args:
        first: stands for TRAIN, a trace or a dump. second: stands for INFER; phases are those of its rows.
        safety: how many times the measured errors a later comparison may show.
        dump, told: as of `hsprobe.diagnose.diff`.

    Raises:
        HsprobeError: a file is unreadable, they are of different models, share no context or depth, differ
            by more than any noise, or the ranks of one of them do among themselves.
    """
    with (
        opened(locate(second), told=told) as b_trace,
        opened(locate(first), dump, beside=b_trace, told=told) as a_trace,
    ):
        a, a_ranks = Survey(a_trace, "train").run()
        b, b_ranks = Survey(b_trace, "infer", a).run()
        check_same_model(a, b)
        for side, ranks in ((a, a_ranks), (b, b_ranks)):
            _refuse_ranks(side, ranks)
        model = Noise(b.num_layers or a.num_layers or 32)
        figures, notes = _figures(a, b)
        if not figures:
            raise HsprobeError(
                f"{a_trace.path} and {b_trace.path} share no depth with {MIN_ROWS} rows of equal token ids: "
                "there is nothing to measure.",
                "Capture both with '--sites aux,layer' and the same prompts.",
            )
        _refuse_faults(figures, a, b)
        notes += [*_remarks(figures, model), *a_ranks.notes, *b_ranks.notes]
        created = datetime.now(UTC).isoformat(timespec="seconds")
        tolerance = Tolerance(figures, [_provenance(a), _provenance(b)], safety, created)
    return Learned(tolerance, model, notes)


def _figures(a: Side, b: Side) -> tuple[list[Figure], list[str]]:
    found: dict[tuple[int | str, int, tuple[str, str]], Figure] = {}
    few: dict[str, int] = {}
    for depth, left, right in _couples(a, b):
        # Nothing is over a limit here; only the distribution counts.
        jobs: list[tuple[Lane, Lane, Limits]] = [(left, right, float("inf"))]
        dtypes = pair_of(*dtypes_between(a, b, left.stack, right.stack))
        for phase, stats in compare_many(jobs)[0].by_phase.items():
            if stats.finite < MIN_ROWS:
                few[phase_name(phase)] = max(few.get(phase_name(phase), 0), stats.finite)
            elif (depth, phase, dtypes) not in found:
                found[depth, phase, dtypes] = _figure(depth, phase, dtypes, stats)
    covered = {phase_name(figure.phase) for figure in found.values()}
    notes = [
        f"Phase {phase} has only {plural(rows, 'row')}: it is left to the noise model."
        for phase, rows in few.items()
        if phase not in covered
    ]
    return sorted(found.values(), key=_order), notes


def _couples(a: Side, b: Side) -> Iterator[tuple[int | str, Lane, Lane]]:
    """(depth, lane of b, lane of a): the stream first, then chunks by the depths they are said to have."""
    others, mine = a.layers, b.layers
    for depth, lane in (*mine.items(), *_chunks(b)):
        for other_depth, other in (*others.items(), *_chunks(a)):
            if depth is not None and depth == other_depth:
                yield depth, lane, other
                break


def _chunks(side: Side) -> list[tuple[Depth, Lane]]:
    stack: Stack | None = side.chunked()
    lanes = chunk_lanes(stack, side.hidden)
    said = served_depths(Serving.of(side.trace.provenance), stack, len(lanes))
    depths = [lane.depth if said[k] is None else said[k] for k, lane in enumerate(lanes)]
    return list(zip(depths, lanes, strict=True))


def _figure(depth: int | str, phase: int, dtypes: tuple[str, str], stats: ErrorStats) -> Figure:
    median, q90, q99, q995, q999 = (stats.quantile(q) for q in (0.5, 0.9, 0.99, 0.995, 0.999))
    return Figure(depth, phase, dtypes, stats.finite, median, q90, q99, q995, q999, stats.largest)


def _order(figure: Figure) -> tuple[tuple[str, str], int, int]:
    return figure.dtypes, figure.depth if isinstance(figure.depth, int) else 1 << 30, figure.phase


def _refuse_faults(figures: list[Figure], a: Side, b: Side) -> None:
    for figure in figures:
        if figure.median >= _NOT_NOISE:
            depth: Depth = figure.depth if isinstance(figure.depth, int) else "final"
            raise HsprobeError(
                f"{a.trace.path} and {b.trace.path} are not two benign captures: at {depth_name(depth)} "
                f"the middle row of {phase_name(figure.phase)} differs by {figure.median:.2f}.",
                "Find the fault with `hsprobe diff` first.",
            )


def _refuse_ranks(side: Side, ranks: RankFacts) -> None:
    """Where ranks that should hold the same do not, none of them says what is right."""
    for found in ranks.differing:
        raise HsprobeError(
            f"{side.trace.path} is no benign capture: {found.member.name} does not hold at "
            f"{found.bad[0].site} what {found.against.name} holds.",
            f"Find the fault with `hsprobe diff {side.trace.path} --between-ranks` first.",
        )


def _remarks(figures: list[Figure], model: Noise) -> list[str]:
    far = [f for f in figures if f.median > _REMARKABLE * _expected(model, f)]
    if not far:
        return []
    worst = max(far, key=lambda f: f.median / _expected(model, f))
    depth: Depth = worst.depth if isinstance(worst.depth, int) else "final"
    return [
        f"At {depth_name(depth)} the middle row of {phase_name(worst.phase)} differs by {worst.median:.1e}, "
        f"{worst.median / _expected(model, worst):.0f} times what the model expects: make sure that both "
        "captures are right before relying on this file."
    ]


def _expected(model: Noise, figure: Figure) -> float:
    depth: Depth = figure.depth if isinstance(figure.depth, int) else "final"
    return model.level(depth, figure.dtypes).expected


def _provenance(side: Side) -> dict[str, Any]:
    summary = side.summary()
    model = side.trace.provenance.get("model")
    known = model if isinstance(model, dict) else {}
    return {
        "path": summary.path,
        "created": side.trace.created,
        "producer": summary.producer,
        "architecture": side.architecture,
        "num_layers": summary.num_layers,
        "hidden_size": summary.hidden_size,
        "dtype": side.model_dtype or summary.dtype,
        "model": known.get("path") if isinstance(known.get("path"), str) else None,
    }
