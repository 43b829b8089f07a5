"""Compare ranks that should hold the same: every tensor of a rank with that of another, row by row.

How far apart they may be follows from where they were last equal bit for bit: the order in which a sum over
ranks is taken may differ in the last place from rank to rank, and such differences grow with every layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hsprobe.compare.align import Pairs
from hsprobe.compare.direct import Lane, compare_many
from hsprobe.compare.direct import errors as row_errors_of
from hsprobe.compare.noise import Level, coarsest, expected_error
from hsprobe.compare.ranks import Member, PassRows, join
from hsprobe.compare.shards import Direct, Limits
from hsprobe.compare.stack import Rows, Stack
from hsprobe.diagnose.chunkline import row_place
from hsprobe.diagnose.growth import layer_line
from hsprobe.diagnose.model import Depth, LayerLine
from hsprobe.diagnose.ranks.facts import RankComparison, SiteDifference
from hsprobe.trace.reader import Trace

CHUNKED = ("aux", "draft.input")
_ROUNDS = 3
_FEW_REQUESTS = 4


@dataclass
class Replicas:
    """Compares ranks of one trace.

    Args:
        stacks: number of a rank -> its tensors by name.
        said: the depths that the chunks are said to have.
        hidden: H. num_layers: L, None where it is not known. model_dtype: what the model computes in.
    """

    trace: Trace
    stacks: Mapping[int, Mapping[str, Stack]]
    passes: Mapping[int, PassRows]
    said: Sequence[Depth]
    hidden: int
    num_layers: int | None
    model_dtype: str | None
    _joined: dict[tuple[int, int], Pairs] = field(default_factory=dict)

    def compare(self, member: Member, against: Member, names: Sequence[str]) -> RankComparison:
        """One rank against another at these tensors."""
        mine, theirs = self.stacks[member.number], self.stacks[against.number]
        both = [name for name in names if name in mine and name in theirs]
        lanes = [(name, self.lanes(theirs[name]), self.lanes(mine[name])) for name in both]
        lanes.sort(key=lambda one: (_order(self.place(one[1][0])), one[0]))
        sites: list[SiteDifference] = []
        for _, left, right in lanes:
            if len(left) == len(right) and left[0].stack.width == right[0].stack.width:
                sites += self._sites(left, right, sites)
        for place, site in _firsts(sites):
            sites[place] = replace(site, requests=self._whose(site, mine[site.name], theirs[site.name]))
        return RankComparison(member, against, sites)

    def lanes(self, stack: Stack) -> list[Lane]:
        """A tensor of one rank by its chunks, with the depths that are known of them."""
        if stack.name not in CHUNKED or stack.width % self.hidden:
            return [Lane(stack, stack.width, depth=stack.depth)]
        count = stack.width // self.hidden
        depths = self.said if len(self.said) == count else [None] * count
        return [Lane(stack, self.hidden, k, depth) for k, depth in enumerate(depths)]

    def place(self, lane: Lane) -> int | None:
        """Twice the depth, one more within a layer; None for what is no state of the stream."""
        stack = lane.stack
        if lane.chunk is not None or stack.width != self.hidden:
            return None
        if stack.tensor.site == "mid" and isinstance(stack.depth, int):
            return 2 * stack.depth + 1
        if stack.name == "embed":
            return 0
        if stack.tensor.site == "layer" and isinstance(stack.depth, int):
            return 2 * stack.depth
        return None

    def _sites(
        self, left: list[Lane], right: list[Lane], before: Sequence[SiteDifference]
    ) -> list[SiteDifference]:
        pairs = self._pairs(left[0].stack, right[0].stack)
        if not len(pairs):
            return []
        levels = [self._level(lane, before) for lane in left]
        jobs: list[tuple[Lane, Lane, Limits]] = [
            (a, b, level.row_limit) for a, b, level in zip(left, right, levels, strict=True)
        ]
        directs = compare_many(jobs, pairs)
        return [self._site(a, d, level) for a, d, level in zip(left, directs, levels, strict=True)]

    def _whose(self, site: SiteDifference, mine: Stack, theirs: Stack) -> str:
        """The requests whose rows differ at a site, in words; empty where most of them do."""
        place = site.chunk or 0
        left, right = self.lanes(theirs)[place], self.lanes(mine)[place]
        pairs = self._pairs(theirs, mine)
        bad = differing(left, right, pairs, Level(site.line.noise).row_limit)
        found = np.unique(theirs.keys.request[bad])
        every = np.unique(theirs.keys.request[pairs.left])
        if not len(found) or len(found) > max(_FEW_REQUESTS, len(every) // 2) or len(found) == len(every):
            return ""
        ids = self.trace.requests.ids
        shown = ", ".join(ids[r] if 0 <= r < len(ids) else "unknown" for r in found[:_FEW_REQUESTS])
        more = ", ..." if len(found) > _FEW_REQUESTS else ""
        return f"{'request' if len(found) == 1 else 'requests'} {shown}{more} alone"

    def _pairs(self, left: Stack, right: Stack) -> Pairs:
        key = (id(left.keys), id(right.keys))
        if key not in self._joined:
            self._joined[key] = join(left, right, self.passes)
        return self._joined[key]

    def _level(self, lane: Lane, before: Sequence[SiteDifference]) -> Level:
        """What the order of sums alone may make of it."""
        place = self.place(lane)
        depth = lane.depth if isinstance(lane.depth, int) else self.num_layers or 32
        end = 2 * depth if place is None else place
        equal = -1
        for site in before:
            if site.place is not None and site.place <= end:
                if not site.exact:
                    break
                equal = site.place
        layers = (end - equal + 1) // 2 if equal >= 0 else depth + 1
        dtype = coarsest(self.model_dtype, lane.stack.dtype)
        return Level(expected_error(dtype, max(layers - 1, 0)))

    def _site(self, lane: Lane, direct: Direct, level: Level) -> SiteDifference:
        stack = lane.stack
        levels = dict.fromkeys(direct.by_phase, level)
        line = layer_line(lane.depth, direct, levels)
        total = direct.total
        # One rank alone may hold a NaN.
        uneven = direct.left_nonfinite != direct.right_nonfinite
        if uneven:
            line = _not_ok(line)
        first = min((s.first_over for s in direct.by_phase.values() if s.first_over >= 0), default=-1)
        if first < 0:
            first = min((s.first_above for s in direct.by_phase.values() if s.first_above >= 0), default=-1)
        return SiteDifference(
            site=stack.name if lane.chunk is None else f"{stack.name} chunk {lane.chunk}",
            name=stack.name,
            chunk=lane.chunk,
            depth=lane.depth,
            place=self.place(lane),
            line=line,
            exact=total.largest == 0 and not uneven,
            first=row_place(stack, self.trace, first if not uneven else direct.first_nonfinite),
            worst=total.largest,
            worst_at=row_place(stack, self.trace, total.largest_at),
        )


def _firsts(sites: Sequence[SiteDifference]) -> list[tuple[int, SiteDifference]]:
    """The first site of the stream that differs, and the first of what is handed to the draft."""
    bad = [(place, site) for place, site in enumerate(sites) if not site.line.ok]
    stream = [one for one in bad if one[1].place is not None][:1]
    return [*stream, *[one for one in bad if one[1].chunk is not None][:1]]


def differing(left: Lane, right: Lane, pairs: Pairs, limit: float) -> Rows:
    """Rows of the left lane's stack that differ from their partners."""
    found: Rows = pairs.left[~(row_errors_of(left, right, pairs) <= limit)]
    return found


def _not_ok(line: LayerLine) -> LayerLine:
    return replace(line, ok=False)


def _order(place: int | None) -> int:
    return place if place is not None else 1 << 30


def equal_ranks(
    group: Sequence[Member], compare: Callable[[Member, Member], RankComparison]
) -> tuple[list[list[Member]], list[RankComparison]]:
    """Sort the ranks of a group into classes of equal ones.

    In at most so many rounds that the cost grows with the number of ranks, not with its square: what is
    left after them stands alone.

    Returns:
        The classes, in the order of their first members, and the comparisons with the first of all, and of
        equal ranks with the one that speaks for them.
    """
    waiting, classes, made = list(group), [], []
    for _ in range(_ROUNDS):
        if not waiting:
            break
        base, others = waiting[0], waiting[1:]
        found = [compare(other, base) for other in others]
        made += [one for one in found if base is group[0] or not one.bad]
        equal = [one.member for one in found if not one.bad]
        classes.append([base, *equal])
        waiting = [one.member for one in found if one.bad]
    classes += [[member] for member in waiting]
    return classes, made
