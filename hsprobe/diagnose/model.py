"""What a diagnosis says: findings, table lines, and the report around them. Plain data, no arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from hsprobe.compare.coverage import Coverage
from hsprobe.diagnose.draft.model import DraftFindings

Depth = int | Literal["final"] | None


class State(Enum):
    """What became of one chunk."""

    OK = "ok"
    WRONG = "wrong depth"
    FORM = "another form of the state"
    ROWS = "rows of another place"
    DIFFERENT = "right place, other values"
    SOME_ROWS = "some rows differ"
    UNKNOWN = "matches nothing"
    NO_ROWS = "no rows to compare"


@dataclass(frozen=True)
class PhaseLine:
    """One chunk or layer in one phase. `error` is the median row error; NaN without finite rows.

    Attributes:
        noise, noise_from: error to expect, and whether the "model" or a measured "file" says so.
        passes_at: the smallest expected noise at which these rows would pass; NaN without finite rows, None
            where none would do (the rows are clearly of another depth).
    """

    phase: str
    rows: int
    error: float
    over: int
    state: State
    served: Depth = None
    noise: float = math.nan
    noise_from: str = "model"
    passes_at: float | None = math.nan


@dataclass(frozen=True)
class ChunkLine:
    """One chunk: what the draft was trained on, and what it is served.

    Attributes:
        trained: depth of the training chunk.
        trained_from: how that is known: "declared" by the dump, "identified" by hsprobe, "asked for" by the
            serving config (the training side being a whole model), or "unknown".
        declared: depth the dump declares, where it declares one.
        served: depth that the served chunk was found to carry; `form` and `origin` say what else was found
            about it, in words, and are empty where it is the state itself of the row itself.
        served_chunk: the training chunk that it equals, if that is all that can be said.
        error: median row error of served against trained.
        best_error: the same against the best candidate.
        noise: error to expect between faithful computations.
        margin: how many times worse the second best candidate fits, None with a single candidate.
        agree, rows: rows in which the best candidate beats all others, of the rows that could vote.
        compared, over: rows compared directly, and how many of them differ by more than a single row may.
        noise_from, passes_at: as of a `PhaseLine`.
        worst: largest row error. worst_at, nonfinite_at: where that and the first NaN or Inf are, in words.
    """

    index: int
    trained: Depth
    trained_from: str
    declared: Depth
    served: Depth
    served_chunk: int | None
    state: State
    error: float
    best_error: float
    noise: float
    margin: float | None
    next_best: str | None
    agree: int
    rows: int
    confidence: float
    compared: int
    over: int
    worst: float
    worst_at: str
    nonfinite_train: int = 0
    nonfinite_infer: int = 0
    nonfinite_at: str = ""
    phases: list[PhaseLine] = field(default_factory=list)
    noise_from: str = "model"
    passes_at: float | None = math.nan
    form: str = ""
    origin: str = ""


@dataclass(frozen=True)
class LayerLine:
    """The same tensor on both sides (a depth of the residual stream, or the final norm's output)."""

    depth: Depth
    error: float
    noise: float
    rows: int
    over: int
    ok: bool
    nonfinite: int = 0
    phases: list[PhaseLine] = field(default_factory=list)
    noise_from: str = "model"
    passes_at: float | None = math.nan


@dataclass(frozen=True)
class GrowthPoint:
    """The error of one row at one depth, and the noise expected there."""

    depth: Depth
    error: float
    noise: float


@dataclass(frozen=True)
class Divergence:
    """Where the residual streams of the two sides first differ by more than noise.

    Attributes:
        depth, phase: the first depth, and the phase of its earliest row that differs.
        request, position, token: that row: id of its request (None where unknown), position, token id.
        error, noise: its row error there, and the error to expect.
        curve: its error at every depth, before and after.
    """

    depth: Depth
    phase: str
    request: str | None
    position: int
    token: int
    error: float
    noise: float
    curve: list[GrowthPoint] = field(default_factory=list)


@dataclass(frozen=True)
class Mend:
    """What to change.

    Attributes:
        change: the line to change, old and new, where one line does it.
        steps: where to change it, or what to do where no line does it.
    """

    change: str | None = None
    steps: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Finding:
    """One named fault.

    Attributes:
        code, name: stable code and name of the fault class, `HS101` and `LAYER_SHIFT`.
        rank: how damaging; findings are shown in ascending order.
        chunks: the chunks that it explains.
        agree, rows: rows that bear it out, of those that could; `tally` says what is counted.
    """

    code: str
    name: str
    title: str
    rank: int
    confidence: float
    evidence: list[str] = field(default_factory=list)
    mend: Mend = field(default_factory=Mend)
    chunks: list[int] = field(default_factory=list)
    agree: int = 0
    rows: int = 0
    tally: str = "rows agree"


@dataclass(frozen=True)
class SideSummary:
    """One of the two traces, for the head of a report."""

    path: str
    producer: str
    architecture: str | None
    num_layers: int | None
    hidden_size: int
    dtype: str
    state: str
    gaps: int


@dataclass(frozen=True)
class RankLine:
    """One rank of the capture against the one that speaks for its group.

    Attributes:
        rank, against: their numbers.
        tp, pp, dp: its place.
        sites, differ: tensors (or chunks) compared, and how many of them differ.
        rows: compared at a site, at most. exact: all of them are equal bit for bit.
        error, noise: of the site that comes nearest to its noise, or exceeds it most.
        first: the first site that differs, in the order of the model.
    """

    rank: int
    against: int
    tp: int
    pp: int
    dp: int
    sites: int
    differ: int
    rows: int
    exact: bool
    error: float
    noise: float
    first: str


@dataclass(frozen=True)
class Ranks:
    """The ranks of a capture that has several.

    Attributes:
        summary: what became of them, in a few words.
    """

    summary: str
    count: int
    lines: list[RankLine]


@dataclass(frozen=True)
class Report:
    """Everything `hsprobe diff` found out.

    Attributes:
        compared: the tensor names compared, such as "aux" with "aux".
        notes: what the traces cannot tell, and which capture could.
        draft: the served draft against its checkpoint; None where none was given.
        ranks: None where the capture has one rank.
    """

    same: bool
    train: SideSummary
    infer: SideSummary
    compared: str
    findings: list[Finding]
    chunks: list[ChunkLine]
    layers: list[LayerLine]
    coverage: Coverage
    notes: list[str]
    divergence: Divergence | None = None
    draft: DraftFindings | None = None
    ranks: Ranks | None = None
