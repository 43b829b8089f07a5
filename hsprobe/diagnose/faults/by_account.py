"""Chunks that match nothing captured, where the server's own account of its depths says why."""

from __future__ import annotations

from hsprobe.diagnose.evidence import Evidence
from hsprobe.diagnose.mend import ids_mend
from hsprobe.diagnose.model import Depth, Finding, State
from hsprobe.diagnose.naming import listed, numbers
from hsprobe.diagnose.wording import figure

CODE = "LAYER_SET"
RANK = 35
# That the chunks differ is measured; that they are what the server calls them is only its word.
_CONFIDENCE = 0.8


def diagnose(evidence: Evidence, explained: frozenset[int]) -> list[Finding]:
    """One finding if a capture without depths contradicts the dump, and so do the depths the server names."""
    if evidence.has_depths:
        return []
    claims: dict[int, tuple[Depth, Depth]] = {}
    for line in evidence.lines:
        claim = evidence.claimed_depths[line.index]
        unknown = line.state is State.UNKNOWN and line.index not in explained
        if unknown and None not in (claim, line.trained) and claim != line.trained:
            claims[line.index] = (claim, line.trained)
    if not claims:
        return []
    chunks = list(claims)
    noun, verb, depth = ("chunk", "is", "depth") if len(chunks) == 1 else ("chunks", "are", "depths")
    said = listed(claim for claim, _ in claims.values())
    meant = listed(trained for _, trained in claims.values())
    lines = [line for line in evidence.lines if line.index in claims]
    errors = ", ".join(f"chunk {line.index} {figure(line.error)}" for line in lines)
    return [
        Finding(
            code=CODE,
            title=(
                f"aux {noun} {numbers(chunks)} {verb} not what the draft was trained on; by the server's "
                f"account {depth} {said}, trained on {meant}"
            ),
            rank=RANK,
            confidence=_CONFIDENCE,
            evidence=[
                f"error against the training chunk: {errors}; expected noise {figure(lines[0].noise)}",
                "No depths were captured that could prove which depth is served: '--sites aux,layer' would.",
            ],
            mend=ids_mend(evidence),
            chunks=chunks,
            agree=min(line.over for line in lines),
            rows=min(line.compared for line in lines),
            tally="rows differ",
        )
    ]
