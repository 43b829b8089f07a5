"""Put the measurements of one chunk into a line of the table."""

from __future__ import annotations

from hsprobe.compare.noise import needed
from hsprobe.compare.shards import Direct
from hsprobe.compare.stack import Stack
from hsprobe.compare.statistics import ErrorStats
from hsprobe.diagnose.evidence import ChunkEvidence
from hsprobe.diagnose.identify import Identity, Label
from hsprobe.diagnose.judge import Verdict, judge, passes_at
from hsprobe.diagnose.model import ChunkLine, Depth, PhaseLine, State
from hsprobe.diagnose.naming import phase_name, short
from hsprobe.trace.reader import Trace


def chunk_evidence(
    index: int,
    *,
    direct: Direct,
    whole: Identity,
    by_phase: dict[int, Identity],
    trained: tuple[Depth, str, Depth],
    wanted: Label,
    declared_served: Depth,
    places: tuple[str, str],
) -> ChunkEvidence:
    """The evidence for served chunk `index`.

    Args:
        direct: served against trained.
        whole, by_phase: what the served chunk was identified as.
        trained: depth of the training chunk, how it is known, what the dump declares.
        declared_served: the depth that the server says it is.
        places: where the worst row and the first row that is not finite are, in words.
    """
    verdict, total = judge(direct, whole, by_phase, wanted), direct.total
    phases = _phase_lines(direct, whole, by_phase, verdict)
    served, served_chunk = _served(whole, verdict.state, trained[0], declared_served)
    line = ChunkLine(
        index=index,
        trained=trained[0],
        trained_from=trained[1],
        declared=trained[2],
        served=served,
        served_chunk=served_chunk,
        state=verdict.state,
        error=total.median,
        best_error=whole.error,
        noise=whole.expected,
        margin=whole.margin,
        next_best=None if whole.second is None else label_name(whole.second),
        agree=whole.agree,
        rows=whole.rows,
        confidence=whole.confidence,
        compared=total.rows,
        over=total.over_limit,
        worst=total.largest,
        worst_at=places[0],
        nonfinite_train=direct.right_nonfinite,
        nonfinite_infer=direct.left_nonfinite,
        nonfinite_at=places[1],
        phases=phases,
        noise_from=whole.source,
        passes_at=passes_at(_passes_at(total, verdict.state), phases),
    )
    return ChunkEvidence(line, whole, wanted, direct)


def _phase_lines(
    direct: Direct, whole: Identity, by_phase: dict[int, Identity], verdict: Verdict
) -> list[PhaseLine]:
    lines = []
    for phase, stats in sorted(direct.by_phase.items()):
        identity = by_phase.get(phase)
        state = verdict.phases[phase]
        lines.append(
            PhaseLine(
                phase_name(phase),
                stats.rows,
                stats.median,
                stats.over_limit,
                state,
                label_depth(identity.best) if identity is not None and identity.clear else None,
                noise=(identity or whole).expected,
                noise_from=(identity or whole).source,
                passes_at=_passes_at(stats, state),
            )
        )
    return lines


def _passes_at(stats: ErrorStats, state: State) -> float | None:
    return None if state is State.WRONG else needed(stats)


def _served(identity: Identity, state: State, trained: Depth, declared: Depth) -> tuple[Depth, int | None]:
    """(depth of the served chunk, training chunk that it equals) as far as either can be told."""
    if state is State.OK and trained is not None:
        return trained, None
    if not identity.clear or identity.best is None:
        return None, None
    if identity.best.kind == "chunk":
        return declared, identity.best.number
    return label_depth(identity.best), None


def label_depth(label: Label | None) -> Depth:
    """The depth a label names, None where it names none."""
    if label is None:
        return None
    return "final" if label.kind == "final" else label.depth


def label_name(label: Label) -> str:
    """A label for a table cell."""
    if label.kind == "chunk":
        return f"training chunk {label.number}"
    if label.kind == "constant":
        return "one vector in every row"
    return short(label_depth(label))


def row_place(stack: Stack, trace: Trace, row: int) -> str:
    """`request r0, position 12 (prefill)`; empty without a row."""
    if row < 0:
        return ""
    keys = stack.keys
    request = int(keys.request[row])
    names = trace.requests.ids
    name = names[request] if 0 <= request < len(names) else "unknown"
    return f"request {name}, position {int(keys.position[row])} ({phase_name(int(keys.phase[row]))})"
