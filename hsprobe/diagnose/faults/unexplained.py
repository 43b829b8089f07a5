"""What no other class accounts for: described, never guessed at."""

from __future__ import annotations

from hsprobe.diagnose.chunkline import label_name
from hsprobe.diagnose.evidence import ChunkEvidence, Evidence
from hsprobe.diagnose.explanation import Explanation
from hsprobe.diagnose.model import Finding, Mend, State
from hsprobe.diagnose.naming import listed, numbers
from hsprobe.diagnose.valuation import ranks_part_before
from hsprobe.diagnose.wording import figure

RANK = 90
EXPLANATION = Explanation(
    code="HS599",
    name="UNEXPLAINED",
    summary="states differ in a way that no other class accounts for",
    symptom="Acceptance is down, by any amount.",
    cause="Not known. The finding describes the difference instead of guessing at it.",
    evidence=(
        "No depth, form, row or order that was tried explains the rows. Described are: where in depth, "
        "rows and channels the difference lies, how it grows, and whether it is a constant, a scale, low "
        "in rank, or a rotation."
    ),
    mend=(
        "Follow the description. A capture of more sites ('--sites aux,layer,mid') lets hsprobe try more "
        "forms."
    ),
)
# Shares from which a difference is called by that name.
_MOSTLY, _NEARLY_ALL, _ISOMETRIC, _FAR = 0.5, 0.9, 0.98, 0.3


def diagnose(evidence: Evidence, explained: frozenset[int]) -> list[Finding]:
    """One finding for all remaining chunks that differ in the same way."""
    groups: dict[State, list[ChunkEvidence]] = {}
    if evidence.trained_chunks != evidence.served_chunks:
        return []
    for chunk in evidence.chunks:
        state = chunk.line.state
        # A chunk may have a fault that is named, and rows beside that nothing accounts for.
        left = chunk.fallen if chunk.served else chunk.line.index not in explained
        left = left and not ranks_part_before(evidence, [chunk.line.trained])
        if left and state not in (State.OK, State.NO_ROWS):
            groups.setdefault(state, []).append(chunk)
    return [_finding(evidence, state, chunks) for state, chunks in groups.items()]


def _finding(evidence: Evidence, state: State, chunks: list[ChunkEvidence]) -> Finding:
    lines = [chunk.line for chunk in chunks]
    measured = state is State.DIFFERENT
    return EXPLANATION.finding(
        _title(state, chunks),
        rank=RANK,
        # A place that was identified is as sure as the identification; that rows differ is measured.
        confidence=min(line.confidence for line in lines) if measured else 1.0,
        evidence=[sentence for chunk in chunks for sentence in _proof(chunk, evidence)],
        mend=Mend(steps=[_step(evidence, state)]),
        chunks=[line.index for line in lines],
        agree=max(line.over for line in lines),
        rows=max(line.compared for line in lines),
        tally="rows differ",
    )


def _title(state: State, chunks: list[ChunkEvidence]) -> str:
    lines = [chunk.line for chunk in chunks]
    one = len(lines) == 1
    name = f"aux {'chunk' if one else 'chunks'} {numbers([line.index for line in lines])}"
    depths = f"{'depth' if one else 'depths'} {listed(line.trained for line in lines)}"
    if state is State.SOME_ROWS:
        over = max(line.over for line in lines)
        rows = f"{over:,} of {lines[0].compared:,}"
        return f"{name} {'matches' if one else 'match'} in most rows, but {rows} differ"
    if state is State.DIFFERENT:
        verb, whose = ("is", "its") if one else ("are", "their")
        return f"{name} {verb} {depths} as trained, but {whose} values are further off than noise"
    if all(chunk.identity.best is not None and chunk.identity.best.kind == "constant" for chunk in chunks):
        return f"{name} {'holds' if one else 'hold'} one and the same vector in every row"
    return f"{name} {'matches' if one else 'match'} nothing that was captured (trained on {depths})"


def _proof(chunk: ChunkEvidence, evidence: Evidence) -> list[str]:
    line = chunk.line
    proof = [
        f"chunk {line.index}: error {figure(line.error)}, expected noise {figure(line.noise)}; "
        f"{line.over:,} of {line.compared:,} rows differ by more than one row may"
    ]
    if len(line.phases) > 1:
        proof.append("by phase: " + ", ".join(f"{p.phase} {figure(p.error)}" for p in line.phases))
    if line.worst_at:
        proof.append(f"worst row: {figure(line.worst)} at {line.worst_at}")
    proof += _described(chunk, evidence)
    identity = chunk.identity
    if line.state is State.UNKNOWN and identity.best is not None and identity.best.kind != "constant":
        near = f"nearest candidate: {label_name(identity.best)}, error {figure(identity.error)}"
        if identity.second is not None:
            near += f"; next {label_name(identity.second)}, {figure(identity.second_error)}"
        proof.append(near)
    return proof


def _described(chunk: ChunkEvidence, evidence: Evidence) -> list[str]:
    """What the difference is like."""
    if chunk.between is not None:
        found = [
            f"the rows lie between depth {chunk.between - 1} and {chunk.between}, as they would without that "
            "layer's last add (HS205) or with the next attention added (HS203): a capture with '--sites "
            "aux,layer,mid' tells"
        ]
        return [*found, *_one_of_many(evidence)]
    one = next((d for d in evidence.differences if d.chunk == chunk.line.index), None)
    if one is None:
        return []
    shape, found = one.shape, []
    if shape.constant >= _MOSTLY:
        found.append(f"one vector, the same in all rows, makes up {shape.constant:.0%} of it")
    elif shape.low_rank >= _NEARLY_ALL:
        found.append(f"four directions hold {shape.low_rank:.0%} of it: it is low in rank")
    if shape.scaled >= _MOSTLY:
        found.append(f"the trained states times {shape.scale:.3g} explain {shape.scaled:.0%} of it")
    if shape.gram >= _ISOMETRIC and one.error >= _FAR:
        found.append(
            f"inner products between rows are the same on both sides (correlation {shape.gram:.3f}): the "
            "channels are rotated or permuted"
        )
    if shape.channels >= _MOSTLY:
        found.append(f"one channel in a hundred holds {shape.channels:.0%} of it")
    return found or ["it has no constant, scale, low rank or rotation in it, and is spread over the channels"]


def _one_of_many(evidence: Evidence) -> list[str]:
    """Where one rank of several was recorded, what its rows may be a part of."""
    if evidence.summed_ranks < 2 or any(facts.several for facts in evidence.ranks if facts.side == "infer"):
        return []
    return [
        f"one of {evidence.summed_ranks} ranks was recorded: its own part of a sum that was never taken "
        "(HS703) "
        "lies there too; record all ranks"
    ]


def _step(evidence: Evidence, state: State) -> str:
    if state is State.UNKNOWN and not evidence.has_depths:
        return (
            "No depths were captured to compare with, so it cannot be told whether this is another layer, "
            "the final norm's output or a partial sum; capture with '--sites aux,layer'."
        )
    if state is State.SOME_ROWS:
        return "The ids are right: look at the rows named here (their position, phase and batch)."
    if state is State.DIFFERENT:
        return "The ids are right: look at precision (dtype, quantisation, KV cache) and the weights served."
    return "No wiring of layers explains it: look at the rows named here, and at the weights on both sides."
