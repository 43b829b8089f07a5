"""What a draft is found to do: a line a stage, verdicts for those that differ. Plain data, no arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

KINDS = (
    "fc",
    "norm",
    "recycle",
    "embed",
    "tokens",
    "rope",
    "position",
    "vocab",
    "weights",
    "kv",
    "mask",
    "unexplained",
)
"""What a verdict is about; each is one fault class's."""


@dataclass(frozen=True)
class StageLine:
    """One stage of the draft: what was captured against what the checkpoint gives.

    Attributes:
        site: name of the tensor, with the part of it where parts were looked at alone: `draft.qkv k`.
        error: median row error; NaN without rows. noise: the error to expect.
        rows, over: rows compared, and how many of them differ by more than a single row may.
        phases: phase -> median row error.
    """

    site: str
    error: float
    noise: float
    rows: int
    over: int
    ok: bool
    phases: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """One thing that the draft does otherwise than its checkpoint says.

    Attributes:
        kind: one of `KINDS`. site: where it shows.
        title: in words. change, steps: as of a `Mend`.
        proof: sentences of evidence.
        error: what the hypothesis leaves of `before`, the error against the checkpoint; `second` is what the
            next best one leaves, None where nothing else was tried.
        agree, rows: rows that bear it out, of those that could.
        confidence: 0..1.
    """

    kind: str
    site: str
    title: str
    change: str | None = None
    steps: list[str] = field(default_factory=list)
    proof: list[str] = field(default_factory=list)
    error: float = 0.0
    before: float = math.nan
    second: float | None = None
    agree: int = 0
    rows: int = 0
    confidence: float = 1.0


@dataclass(frozen=True)
class DraftFindings:
    """All that was found of one captured draft.

    Attributes:
        draft, target: the folders that it was held against.
        stages: in the order in which they run. verdicts: what differs. notes: what could not be compared.
    """

    draft: str
    target: str | None
    stages: list[StageLine] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
