"""What is known of the ranks of one trace. Plain data, no arrays."""

from __future__ import annotations

from dataclasses import dataclass, field

from hsprobe.compare.ranks import Member, names
from hsprobe.diagnose.forms import Fit
from hsprobe.diagnose.model import Depth, LayerLine


@dataclass(frozen=True)
class SiteDifference:
    """One tensor, or one chunk of it, of one rank against the same of another.

    Attributes:
        site: its name, with the chunk where it has chunks: `layer/003`, `aux chunk 0`.
        name, chunk, depth: of the tensor.
        place: where in the model it is taken: twice the depth, one more within the layer; None elsewhere.
        line: the figures; `exact` where all rows are equal bit for bit.
        first: the first row that differs, in words. worst, worst_at: the largest row error.
        requests: whose rows differ, where that is not all of them, in words.
    """

    site: str
    name: str
    chunk: int | None
    depth: Depth
    place: int | None
    line: LayerLine
    exact: bool
    first: str = ""
    worst: float = 0.0
    worst_at: str = ""
    requests: str = ""


@dataclass(frozen=True)
class RankComparison:
    """One rank against the one that speaks for its group.

    Attributes:
        sites: in the order of the model, those outside of the stream last.
    """

    member: Member
    against: Member
    sites: list[SiteDifference]

    @property
    def bad(self) -> list[SiteDifference]:
        return [site for site in self.sites if not site.line.ok]

    @property
    def exact(self) -> bool:
        return all(site.exact for site in self.sites)


@dataclass(frozen=True)
class PartialSum:
    """A sum over ranks that was not taken.

    Attributes:
        where: `aux chunk 0`, or `depth 5` of the stream itself.
        chunks: chunks concerned; empty for the stream.
        depths: of the states that the sums give, one a chunk; of the stream one.
        term: "mlp", "attention", "block" (both), "state" (all of it), or "" where that cannot be told.
        over: how many different parts there are.
        fit: how well the sum explains the rows; None where no term could be tried.
        alone: error of the best single rank.
        members: the ranks that hold the parts.
        source: which side's states the sum was compared with.
        phases: those in which it is missing; empty for all.
    """

    where: str
    chunks: list[int]
    depths: list[int]
    term: str
    over: int
    fit: Fit | None
    alone: float
    members: list[Member]
    source: str = "infer"
    phases: list[int] = field(default_factory=list)

    @property
    def stream(self) -> bool:
        """Whether it is the residual stream itself, rather than what is handed to the draft."""
        return not self.chunks


@dataclass(frozen=True)
class WidthShards:
    """A tensor of which every rank holds some columns, or in which such columns were joined in another order.

    Attributes:
        name: of the tensor. width: columns of one shard, of the `hidden` of a chunk.
        order: of the shards: the ranks in the order in which they join; of a joined tensor, for each block of
            columns the one that should stand there. None where it could not be told.
        joined: the tensor is joined, in the wrong order.
        error: of the joined tensor in the right order; `before` as it is.
    """

    name: str
    members: list[Member]
    width: int
    hidden: int
    order: list[int] | None
    joined: bool
    error: float
    before: float


@dataclass(frozen=True)
class Scatter:
    """A tensor of which every rank holds some rows, or whose rows stand in the order of such parts.

    Attributes:
        order: "in blocks", "interleaved", or "" where it is neither.
        moved: the rows do not stand where their labels say.
        whole: every rank holds all rows; only their order is wrong.
        rows, of: rows of a rank, of those of the passes.
        phases: those in which it is so; empty for all.
    """

    name: str
    members: list[Member]
    order: str
    moved: bool
    whole: bool
    rows: int
    of: int
    phases: list[int] = field(default_factory=list)

    @property
    def handed(self) -> bool:
        """Whether it is what the draft is handed."""
        return self.name in ("aux", "draft.input")


@dataclass(frozen=True)
class Padding:
    """Rows of tokens that hold the states of padding rows: `rows` of the `of` that a rank holds."""

    name: str
    member: Member
    rows: int
    of: int
    example: str


@dataclass(frozen=True)
class Stages:
    """Pipeline stages.

    Attributes:
        feeds: the rank that feeds the draft. seen: each stage's first rank and the depths that it recorded.
        missing: depths asked for that only another stage saw.
    """

    feeds: Member
    seen: list[tuple[Member, list[int]]]
    missing: list[int]


@dataclass
class RankFacts:
    """Everything about the ranks of one side.

    Attributes:
        side: "train" or "infer".
        size: how many ranks share a sum, recorded or not; 1 without tensor parallelism.
        comparisons: every rank against the one that speaks for its group.
        classes: of each group: ranks that are equal to one another, the one that speaks first.
        partials: sums that were not taken.
        named: numbers of ranks whose difference other findings name.
        undecided: which of the ranks is right cannot be told.
        wrong: numbers of ranks that are known to be wrong.
        notes: what is no fault, and worth knowing.
    """

    side: str
    members: list[Member]
    size: int = 1
    comparisons: list[RankComparison] = field(default_factory=list)
    classes: list[list[list[Member]]] = field(default_factory=list)
    partials: list[PartialSum] = field(default_factory=list)
    shards: list[WidthShards] = field(default_factory=list)
    scatters: list[Scatter] = field(default_factory=list)
    paddings: list[Padding] = field(default_factory=list)
    stages: Stages | None = None
    named: set[int] = field(default_factory=set)
    undecided: bool = False
    wrong: set[int] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    @property
    def several(self) -> bool:
        return len(self.members) > 1

    @property
    def differing(self) -> list[RankComparison]:
        return [found for found in self.comparisons if found.bad]

    @property
    def broken_from(self) -> int | None:
        """The place in the model from which the stream is not known to be that of all ranks; None if it "
        "is."""
        if self.wrong and not self.undecided:
            return None
        places = [s.place for c in self.comparisons for s in c.bad if s.place is not None and s.chunk is None]
        return min(places, default=None)

    def unexplained(self, found: RankComparison) -> list[SiteDifference]:
        """The sites at which a rank differs, of those that no other finding accounts for."""
        if self.named & {found.member.number, found.against.number}:
            return []
        if any(partial.stream for partial in self.partials):
            return []
        chunks = {chunk for partial in self.partials for chunk in partial.chunks}
        bad = [site for site in found.bad if site.chunk is None or site.chunk not in chunks]
        first = [site for site in bad if site.place is not None]
        handed = [site for site in bad if site.chunk is not None]
        if chunks and not first and not handed:
            # What the draft makes of parts of a sum differs too.
            return []
        # What comes first in the model is what the rest follows from.
        return [*first, *handed, *(site for site in bad if site.place is None and site.chunk is None)]

    def odd(self, alike: list[RankComparison]) -> tuple[str, str]:
        """(names of the ranks that are wrong, names of those that are right) as far as that is known."""
        members = [found.member for found in alike]
        base = alike[0].against
        group = next((g for g in self.classes if any(base in one for one in g)), [])
        equal = next((one for one in group if base in one), [base])
        numbers = {member.number for member in members}
        swap = base.number in self.wrong and not self.wrong & numbers
        if not self.wrong & {base.number, *numbers}:
            swap = len(equal) < len(members)
        return (names(equal), names(members)) if swap else (names(members), names(equal))
