"""Sentences and figures that several fault classes share."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hsprobe.diagnose.evidence import Evidence
from hsprobe.diagnose.model import ChunkLine
from hsprobe.diagnose.naming import depth_name, listed


def chunk_sentence(line: ChunkLine) -> str:
    """`aux chunk 0 carries the embedding output (depth 0); the draft was trained on depth 3 (...)`."""
    if line.served is None and line.served_chunk is not None:
        carries = f"what the draft was trained on as chunk {line.served_chunk}"
    else:
        carries = depth_name(line.served)
    if line.trained_from == "asked for":
        return (
            f"aux chunk {line.index} carries {carries}; the server was asked for {depth_name(line.trained)}"
        )
    if line.trained is None:
        return f"aux chunk {line.index} carries {carries}; the draft was trained on something else"
    return f"aux chunk {line.index} carries {carries}; the draft was trained on {depth_name(line.trained)}"


def declared_sentence(lines: Sequence[ChunkLine]) -> list[str]:
    """Where a dump's own declaration is contradicted by what it holds."""
    return [
        f"the dump declares its chunk {line.index} as {depth_name(line.declared)}, "
        f"but it is {depth_name(line.trained)}"
        for line in lines
        if line.declared is not None and line.trained is not None and line.declared != line.trained
    ]


def strength(lines: Sequence[ChunkLine]) -> tuple[float, int, int]:
    """(confidence, rows that agree, rows) of a finding that rests on several chunks: the weakest of them."""
    weakest = min(lines, key=lambda line: (line.confidence, line.agree))
    return weakest.confidence, weakest.agree, weakest.rows


# That the chunks differ is measured; that they are what the server calls them is only its word.
_ACCOUNT_CONFIDENCE = 0.8


def account_sentence(evidence: Evidence, lines: Sequence[ChunkLine]) -> list[str]:
    """What a finding rests on where the served depths are known by the server's word alone."""
    errors = ", ".join(f"chunk {line.index} {figure(line.error)}" for line in lines)
    claims = listed(evidence.claimed_depths[line.index] for line in lines)
    return [
        f"the server says depths {claims}; trained on {listed(line.trained for line in lines)}",
        f"error against the training chunk: {errors}; expected noise {figure(lines[0].noise)}",
        "No depths were captured that could prove which depth is served: '--sites aux,layer' would.",
    ]


def account_strength(lines: Sequence[ChunkLine]) -> tuple[float, int, int]:
    """As `strength`, where the served depths are known by the server's word alone: rows that differ."""
    return _ACCOUNT_CONFIDENCE, min(line.over for line in lines), min(line.compared for line in lines)


def figure(value: float) -> str:
    """An error in three characters of precision: `0`, `4.1e-07`, `0.23`."""
    if math.isnan(value):
        return "-"
    if value == 0:
        return "0"
    return f"{value:.2f}" if value >= 0.1 else f"{value:.1e}"
