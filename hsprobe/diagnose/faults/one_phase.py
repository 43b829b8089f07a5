"""A chunk is right in one phase and wrong in another."""

from __future__ import annotations

from hsprobe.diagnose.evidence import Evidence
from hsprobe.diagnose.model import ChunkLine, Finding, Mend, State
from hsprobe.diagnose.naming import depth_name, numbers
from hsprobe.diagnose.wording import figure

CODE = "ONE_PHASE"
RANK = 14


def diagnose(evidence: Evidence, explained: frozenset[int]) -> list[Finding]:
    """One finding for all chunks that are right in some phases only."""
    mixed = [line for line in evidence.lines if line.index not in explained and _mixed(line)]
    if not mixed:
        return []
    bad = sorted({p.phase for line in mixed for p in line.phases if p.state is not State.OK})
    good = sorted({p.phase for line in mixed for p in line.phases if p.state is State.OK} - set(bad))
    noun = "chunk" if len(mixed) == 1 else "chunks"
    verb = "is" if len(mixed) == 1 else "are"
    title = (
        f"aux {noun} {numbers([line.index for line in mixed])} {verb} right in {' and '.join(good)} "
        f"and wrong in {' and '.join(bad)}"
    )
    wrong = [p for line in mixed for p in line.phases if p.state is not State.OK]
    return [
        Finding(
            code=CODE,
            title=title,
            rank=RANK,
            confidence=min(line.confidence for line in mixed),
            evidence=[_sentence(line) for line in mixed],
            mend=Mend(
                steps=[
                    "The ids hold for every phase, so they are not the cause. Look at what only "
                    f"{' and '.join(bad)} passes through; begin with --disable-cuda-graph and compare again."
                ]
            ),
            chunks=[line.index for line in mixed],
            agree=max(p.rows for p in wrong),
            rows=max(line.compared for line in mixed),
            tally="rows differ",
        )
    ]


def _mixed(line: ChunkLine) -> bool:
    judged = [p.state for p in line.phases if p.state is not State.NO_ROWS]
    spoilt = [state for state in judged if state not in (State.OK, State.SOME_ROWS)]
    return State.OK in judged and bool(spoilt)


def _sentence(line: ChunkLine) -> str:
    parts = []
    for p in line.phases:
        carries = f" ({depth_name(p.served)})" if p.state is State.WRONG and p.served is not None else ""
        parts.append(f"{p.phase} error {figure(p.error)}{carries}")
    return f"chunk {line.index}: {', '.join(parts)}; expected noise {figure(line.noise)}"
