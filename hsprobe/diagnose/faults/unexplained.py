"""What no other class accounts for: described, never guessed at."""

from __future__ import annotations

from hsprobe.diagnose.chunkline import label_name
from hsprobe.diagnose.evidence import ChunkEvidence, Evidence
from hsprobe.diagnose.identify import Label
from hsprobe.diagnose.model import ChunkLine, Finding, Mend, State
from hsprobe.diagnose.naming import depth_name, plural
from hsprobe.diagnose.wording import figure

CODE = "UNEXPLAINED"
RANK = 90


def diagnose(evidence: Evidence, explained: frozenset[int]) -> list[Finding]:
    """One finding for each remaining chunk that differs."""
    quiet = (State.OK, State.NO_ROWS)
    return [
        _finding(evidence, chunk)
        for chunk in evidence.chunks
        if chunk.line.index not in explained and chunk.line.state not in quiet
    ]


def _finding(evidence: Evidence, chunk: ChunkEvidence) -> Finding:
    line = chunk.line
    total = chunk.direct.total
    proof = [
        f"error {figure(line.error)} against the training chunk, expected noise {figure(line.noise)}; "
        f"{line.over:,} of {plural(total.finite, 'row')} differ by more than a single row may"
    ]
    if line.worst_at:
        proof.append(f"worst row: {figure(line.worst)} at {line.worst_at}")
    if len(line.phases) > 1:
        proof.append("by phase: " + ", ".join(f"{p.phase} {figure(p.error)}" for p in line.phases))
    proof += _nearest(chunk)
    return Finding(
        code=CODE,
        title=_title(line, chunk.identity.best),
        rank=RANK,
        confidence=line.confidence if line.state is State.DIFFERENT else 1.0,
        evidence=proof,
        mend=Mend(steps=_steps(evidence, line)),
        chunks=[line.index],
        agree=line.over,
        rows=total.finite,
    )


def _title(line: ChunkLine, best: Label | None) -> str:
    name = f"aux chunk {line.index}"
    if line.state is State.SOME_ROWS:
        return f"{name} matches in most rows, but {line.over:,} of {line.compared:,} differ"
    if line.state is State.DIFFERENT:
        return f"{name} is {depth_name(line.trained)} as trained, but its values are further off than noise"
    if best is not None and best.kind == "constant":
        return f"{name} holds one and the same vector in every row"
    return f"{name} matches no depth that was captured (trained on {depth_name(line.trained)})"


def _nearest(chunk: ChunkEvidence) -> list[str]:
    identity = chunk.identity
    if chunk.line.state is not State.UNKNOWN or identity.best is None:
        return []
    near = f"nearest candidate: {label_name(identity.best)}, error {figure(identity.error)}"
    if identity.second is not None:
        near += f"; next {label_name(identity.second)}, {figure(identity.second_error)}"
    return [near]


def _steps(evidence: Evidence, line: ChunkLine) -> list[str]:
    if line.state is State.UNKNOWN and not evidence.has_depths:
        return [
            "No depths were captured to compare with, so it cannot be told whether this is another layer, "
            "the final norm's output or a partial sum; capture with '--sites aux,layer'."
        ]
    if line.state is State.SOME_ROWS:
        return ["The ids are right: look at the rows named here (their position, phase and batch)."]
    if line.state is State.DIFFERENT:
        return [
            "The ids are right: look at precision (dtype, quantisation, KV cache) and at the weights served."
        ]
    return ["No wiring of layers explains it: look at the rows named here, and at the weights on both sides."]
