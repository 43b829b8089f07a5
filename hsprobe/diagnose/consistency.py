"""Whether one server agrees with itself: what it computed twice for the same tokens, or handed on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from hsprobe.compare.align import Pairs, by_context, pair
from hsprobe.compare.direct import Lane, compare_many
from hsprobe.compare.noise import Level, Noise
from hsprobe.compare.repeats import Repeats, Way, repeats
from hsprobe.compare.shards import Direct, Limits
from hsprobe.compare.stack import Stack, is_draft
from hsprobe.compare.tolerance import Tolerance
from hsprobe.compare.tolerance import read as read_tolerance
from hsprobe.diagnose.chunkline import row_place
from hsprobe.diagnose.draft.findings import held_against
from hsprobe.diagnose.draft.model import DraftFindings
from hsprobe.diagnose.evidence import Serving
from hsprobe.diagnose.growth import Measured, first_divergence, layer_line
from hsprobe.diagnose.model import Depth, Divergence, Finding, LayerLine, SideSummary
from hsprobe.diagnose.naming import phase_name
from hsprobe.diagnose.ranks.survey import Survey
from hsprobe.diagnose.sides import Side, chunk_lanes, dtypes_between, served_depths
from hsprobe.errors import HsprobeError
from hsprobe.remote.location import Location
from hsprobe.trace.reader import Trace
from hsprobe.trace.schema import Launch

REPEAT, HANDOVER, ACCOUNT, RANKS = "repeat", "handover", "account", "ranks"
# How the same token comes to be computed twice, which no ordinary traffic does behind a prefix cache.
HOW_TO_REPEAT = (
    "Send each prompt, and again with its answer appended, to a server with --disable-radix-cache: then "
    "prefill computes what decode or verify computed before."
)


@dataclass(frozen=True)
class SiteLine:
    """One site compared with itself, or with another.

    Attributes:
        site: tensor name, with the chunk where it has chunks: `layer/003`, `aux chunk 0`.
        line: the figures, over all pairs.
        worst, worst_at: largest row error and where it is, in words.
    """

    site: str
    line: LayerLine
    worst: float
    worst_at: str


@dataclass(frozen=True)
class Comparison:
    """One way in which a server can contradict itself.

    Attributes:
        kind: "repeat" (the same tokens computed twice), "handover" (draft.input against aux) or "account"
            (aux against the depths that the server says it is made of), or "ranks" (one rank against
            another).
        left, right: what is compared with what: phases and how they were launched, or sites.
        rows: pairs of rows compared at a site, at most.
        divergence: the first depth at which the stream differs, for repeats.
    """

    kind: str
    left: str
    right: str
    rows: int
    sites: list[SiteLine]
    divergence: Divergence | None = None

    @property
    def title(self) -> str:
        """`verify vs prefill`; `prefill vs itself` in another pass."""
        return f"{self.left} vs {'itself' if self.left == self.right else self.right}"

    @property
    def bad(self) -> list[SiteLine]:
        return [site for site in self.sites if not site.line.ok]


@dataclass(frozen=True)
class SelfReport:
    """Everything that `hsprobe diff` found out about a single capture.

    Attributes:
        rows, contexts, repeated: rows of the target, distinct contexts in them, contexts that occur again.
        draft: the served draft against its checkpoint; None where none was given.
    """

    same: bool
    infer: SideSummary
    comparisons: list[Comparison]
    findings: list[Finding]
    rows: int
    contexts: int
    repeated: int
    notes: list[str] = field(default_factory=list)
    draft: DraftFindings | None = None


def consistency(
    infer: Location | str,
    *,
    noise: Path | str | None = None,
    draft: Path | str | None = None,
    target: Path | str | None = None,
) -> SelfReport:
    """Compare what one server computed for the same tokens in different phases and passes, eager and graph.

    Args:
        infer: trace of a server.
        noise: a file made by `hsprobe noise`, as in `diff`.
        draft, target: folders of both models, to hold the served draft against its checkpoint.

    Raises:
        HsprobeError: the file is unreadable, or holds nothing that could be compared with anything.
    """
    from hsprobe.diagnose.inconsistency import findings
    from hsprobe.diagnose.registry import draft_findings

    tolerance = None if noise is None else read_tolerance(Path(noise))
    with Trace.open(infer) as trace:
        side, ranks = Survey(trace, "infer").run()
        if tolerance is not None:
            tolerance.check_model(side.architecture, side.num_layers, side.hidden)
        checker = Checker(side, tolerance)
        comparisons = checker.run()
        counts = checker.counts()
        drafted = None if draft is None else held_against(trace, draft, target)
        if not comparisons and drafted is None:
            raise HsprobeError(
                f"{trace.path} cannot be compared with itself: no two of its {counts.rows:,} rows have the "
                "same token ids before them, and it lacks aux with either draft.input or layer.",
                HOW_TO_REPEAT,
            )
        found = [*findings(comparisons), *draft_findings(drafted)]
        return SelfReport(
            not found,
            side.summary(),
            comparisons,
            found,
            counts.rows,
            counts.contexts,
            counts.repeated,
            [*(() if drafted is None else drafted.notes), *_notes(len(ranks.members), comparisons)],
            drafted,
        )


def _notes(ranks: int, comparisons: Sequence[Comparison]) -> list[str]:
    notes = []
    if ranks > 1:
        notes.append(
            f"INFER holds {ranks} ranks, of which one speaks here for all that should equal it; "
            "'--between-ranks' compares them with one another."
        )
    if not any(c.kind == REPEAT for c in comparisons):
        notes.append(
            "No token was computed twice with the same tokens before it, so phases and passes could not be "
            f"compared. {HOW_TO_REPEAT}"
        )
    return notes


@dataclass
class Checker:
    """The comparisons within one side."""

    side: Side
    tolerance: Tolerance | None = None
    _known: dict[int, Repeats] = field(default_factory=dict)

    @cached_property
    def noise(self) -> Noise:
        return Noise(self.side.num_layers or 32, self.tolerance)

    @cached_property
    def said(self) -> list[Depth]:
        """The depths that the server says its chunks have."""
        stack = self.side.chunked()
        lanes = chunk_lanes(stack, self.side.hidden)
        return served_depths(Serving.of(self.side.trace.provenance), stack, len(lanes))

    def run(self) -> list[Comparison]:
        """All comparisons that the trace allows."""
        return [*self._repeats(), *self._handover(), *self._account()]

    def counts(self) -> Repeats:
        """Of the target's rows, at the site that has most of them."""
        stacks = [stack for stack in self.side.stacks.values() if not is_draft(stack)]
        found = [self._repeats_of(stack) for stack in stacks or self.side.stacks.values()]
        return max(found, key=lambda repeat: repeat.rows)

    def _repeats(self) -> Iterator[Comparison]:
        kinds = {
            (is_draft(stack), *ways)
            for stack in self.side.stacks.values()
            for ways in self._repeats_of(stack).pairs
        }
        for draft, left, right in sorted(kinds):
            measured: list[tuple[str, Measured]] = []
            for stack in self.side.stacks.values():
                pairs = self._repeats_of(stack).pairs.get((left, right))
                if pairs is not None and is_draft(stack) == draft:
                    measured += self._measure([(lane, lane) for lane in self._lanes(stack)], pairs)
            stream = [m for name, m in measured if name.startswith("layer/")]
            stream += [m for name, m in measured if m.depth == "final" and not name.startswith("layer/")]
            names = way_names(left, right, draft=draft)
            yield self._comparison(REPEAT, *names, measured, stream)

    def _handover(self) -> Iterator[Comparison]:
        aux, handed = self.side.stacks.get("aux"), self.side.stacks.get("draft.input")
        if aux is not None and handed is not None and aux.width == handed.width:
            lanes = zip(self._lanes(handed), self._lanes(aux), strict=True)
            measured = self._measure(list(lanes), by_context(handed.keys, aux.keys))
            if measured:
                yield self._comparison(HANDOVER, "draft.input", "aux", measured)

    def _account(self) -> Iterator[Comparison]:
        aux = self.side.stacks.get("aux")
        measured: list[tuple[str, Measured]] = []
        layers = self.side.layers
        for lane in self._lanes(aux) if aux is not None else []:
            other = layers.get(lane.depth)
            if other is not None:
                measured += self._measure([(lane, other)], pair(lane.stack, other.stack))
        if measured:
            yield self._comparison(ACCOUNT, "aux", "layer", measured)

    def _repeats_of(self, stack: Stack) -> Repeats:
        key = id(stack.keys)
        if key not in self._known:
            self._known[key] = repeats(stack.keys)
        return self._known[key]

    def _lanes(self, stack: Stack) -> list[Lane]:
        """A stack by its chunks, with the depths that are known of them."""
        if stack.name not in ("aux", "draft.input") or stack.width % self.side.hidden:
            return [Lane(stack, stack.width, depth=stack.depth)]
        lanes = chunk_lanes(stack, self.side.hidden)
        said = self.said if len(self.said) == len(lanes) else [None] * len(lanes)
        return [
            Lane(stack, lane.width, lane.chunk, lane.depth if depth is None else depth)
            for lane, depth in zip(lanes, said, strict=True)
        ]

    def _measure(self, couples: Sequence[tuple[Lane, Lane]], pairs: Pairs) -> list[tuple[str, Measured]]:
        if not len(pairs) or not couples:
            return []
        phases = np.unique(couples[0][0].stack.keys.phase[pairs.left]).tolist()
        levels = [self._levels(left, right, phases) for left, right in couples]
        jobs: list[tuple[Lane, Lane, Limits]] = [
            (left, right, {phase: level.row_limit for phase, level in known.items()})
            for (left, right), known in zip(couples, levels, strict=True)
        ]
        directs: list[Direct] = compare_many(jobs, pairs)
        return [
            (_site(left), Measured(left.depth, left, right, direct, known, pairs))
            for (left, right), direct, known in zip(couples, directs, levels, strict=True)
        ]

    def _levels(self, left: Lane, right: Lane, phases: Sequence[int]) -> dict[int, Level]:
        dtypes = dtypes_between(self.side, self.side, left.stack, right.stack)
        return self.noise.levels(left.depth, dtypes, phases)

    def _comparison(
        self,
        kind: str,
        left: str,
        right: str,
        measured: list[tuple[str, Measured]],
        stream: Sequence[Measured] = (),
    ) -> Comparison:
        sites = []
        for name, found in measured:
            total = found.direct.total
            place = row_place(found.left.stack, self.side.trace, total.largest_at)
            sites.append(
                SiteLine(name, layer_line(found.depth, found.direct, found.levels), total.largest, place)
            )
        first = first_divergence(stream, self.side.trace)
        return Comparison(kind, left, right, max(s.line.rows for s in sites), sites, first)


def way_names(left: Way, right: Way, *, draft: bool = False) -> tuple[str, str]:
    """`verify` and `prefill`; where a CUDA graph ran either, `verify (graph)` and `verify (eager)`."""
    whose = "draft " if draft else ""
    launched = left.graph or right.graph

    def name(way: Way) -> str:
        how = f" ({Launch(way.graph).name.lower()})" if launched else ""
        return f"{whose}{phase_name(way.phase).removeprefix(whose)}{how}"

    return name(left), name(right)


def _site(lane: Lane) -> str:
    return lane.stack.name if lane.chunk is None else f"{lane.stack.name} chunk {lane.chunk}"
