"""A chunk carries one depth in one phase and another in another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hsprobe.diagnose.evidence import ChunkEvidence, Evidence
from hsprobe.diagnose.explanation import Explanation
from hsprobe.diagnose.model import Depth, Finding, Mend
from hsprobe.diagnose.naming import depth_name, numbers, phase_name
from hsprobe.diagnose.wiring import mixed
from hsprobe.diagnose.wording import figure

RANK = 14
EXPLANATION = Explanation(
    code="HS304",
    name="GRAPH",
    summary="one phase is handed other depths than another",
    symptom="Acceptance is about none, though what prefill hands over is right.",
    cause=(
        "The layers to capture were set after a CUDA graph had been recorded, or for one runner only: "
        "prefill runs eagerly and obeys, decode or verify replays the old ones."
    ),
    evidence=(
        "Each phase is identified on its own; a chunk is one depth in some phases and another in the others."
    ),
    mend=(
        "Set the layers to capture before graphs are recorded, for every runner; --disable-cuda-graph "
        "shows whether that is it."
    ),
)


def diagnose(evidence: Evidence, explained: frozenset[int]) -> list[Finding]:
    """One finding for all chunks whose depth depends on the phase."""
    chunks = [chunk for chunk in evidence.chunks if mixed(chunk)]
    if not chunks:
        return []
    states = [_by_phase(chunk) for chunk in chunks]
    bad = sorted({phase for good in states for phase, right in good.items() if not right})
    good = sorted({phase for one in states for phase, right in one.items() if right} - set(bad))
    one = len(chunks) == 1
    title = (
        f"aux {'chunk' if one else 'chunks'} {numbers([chunk.line.index for chunk in chunks])} "
        f"{'is' if one else 'are'} right in {' and '.join(good) or 'no phase'} "
        f"and wrong in {' and '.join(bad)}"
        f"{', which CUDA graphs replay' if _only_graphs(evidence, good, bad) else ''}"
    )
    return [
        EXPLANATION.finding(
            title,
            rank=RANK,
            confidence=min(chunk.line.confidence for chunk in chunks),
            evidence=[*_launches(evidence, [*good, *bad]), *(_sentence(chunk) for chunk in chunks)],
            mend=Mend(steps=[_step(evidence, good, bad)]),
            chunks=[chunk.line.index for chunk in chunks],
            agree=max(p.rows for chunk in chunks for p in chunk.line.phases if p.phase in bad),
            rows=max(chunk.line.compared for chunk in chunks),
            tally="rows differ",
        )
    ]


def _graph_rows(evidence: Evidence) -> dict[str, tuple[int, int]]:
    """Phase -> rows that were replayed from CUDA graphs, and all; empty where no row was, or none is said."""
    if evidence.served is None or not evidence.served.keys.graph.any():
        return {}
    keys = evidence.served.keys
    return {
        phase_name(phase): (int(keys.graph[keys.phase == phase].sum()), int((keys.phase == phase).sum()))
        for phase in np.unique(keys.phase).tolist()
    }


def _only_graphs(evidence: Evidence, good: Sequence[str], bad: Sequence[str]) -> bool:
    """Whether what is wrong was replayed from CUDA graphs, and what is right was not."""
    rows = _graph_rows(evidence)
    return (
        bool(good and rows)
        and all(rows.get(phase, (0, 1))[0] == rows.get(phase, (0, 1))[1] for phase in bad)
        and all(rows.get(phase, (0, 1))[0] == 0 for phase in good)
    )


def _launches(evidence: Evidence, phases: Sequence[str]) -> list[str]:
    rows = _graph_rows(evidence)
    named = [
        f"{phase} from CUDA graphs in {rows[phase][0]:,} of {rows[phase][1]:,} rows"
        if rows[phase][0]
        else f"{phase} eagerly"
        for phase in phases
        if phase in rows
    ]
    return [f"the server ran {', '.join(named)}"] if named else []


def _step(evidence: Evidence, good: Sequence[str], bad: Sequence[str]) -> str:
    if _only_graphs(evidence, good, bad):
        return (
            "Only passes replayed from CUDA graphs are wrong: these were captured with other layers than "
            "the configured ids. Set the layers before the capture; --disable-cuda-graph mends it meanwhile."
        )
    return (
        "The ids hold for every phase, so they are not the cause. Look at what only "
        f"{' and '.join(bad)} passes through; begin with --disable-cuda-graph and compare again."
    )


def _by_phase(chunk: ChunkEvidence) -> dict[str, bool]:
    """Phase -> whether the chunk is right there."""
    if not chunk.depths:
        return {p.phase: p.state.value == "ok" for p in chunk.line.phases}
    return {phase_name(phase): depth == chunk.line.trained for phase, depth in chunk.depths.items()}


def _sentence(chunk: ChunkEvidence) -> str:
    line = chunk.line
    depths: dict[str, Depth] = {phase_name(phase): depth for phase, depth in chunk.depths.items()}
    parts = []
    for p in line.phases:
        served = depths.get(p.phase, p.served)
        carries = f" ({depth_name(served)})" if served not in (None, line.trained) else ""
        parts.append(f"{p.phase} error {figure(p.error)}{carries}")
    return f"chunk {line.index}: {', '.join(parts)}; expected noise {figure(line.noise)}"
