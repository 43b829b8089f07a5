"""Find shards of columns, parts of rows, and padding taken for tokens; give the tensor as it should have "
"been."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hsprobe.compare.direct import Lane
from hsprobe.compare.noise import ROW_ALLOWANCE, strays
from hsprobe.compare.ranks import Columns, Member, PassRows, Shards, Taken, join, narrowed
from hsprobe.compare.stack import Rows, Stack
from hsprobe.diagnose.chunkline import row_place
from hsprobe.diagnose.ranks import places
from hsprobe.diagnose.ranks.facts import Padding, RankFacts, Scatter, WidthShards
from hsprobe.diagnose.ranks.replicas import CHUNKED
from hsprobe.diagnose.settle import same_process_noise
from hsprobe.trace.reader import Trace
from hsprobe.trace.schema import Phase

# Two ranks of which one holds less than this share of the other's rows hold parts.
_SHARED = 0.1
_HALF = 0.5
_PHASES = max(Phase) + 1


@dataclass(frozen=True)
class Parts:
    """What ranks hold of a tensor's rows.

    Attributes:
        stacks: number of a rank -> its rows, under their right labels; together each row once.
        wholly: in no phase any rank holds all rows.
    """

    stacks: dict[int, Stack]
    wholly: bool


@dataclass
class Placement:
    """Looks at where columns and rows stand.

    Args:
        hidden: H. said: depths of the chunks.
        truth: rank -> depth -> the state, of its own stream or else of the other side.
        ranks: how many share a tensor.
    """

    trace: Trace
    stacks: Mapping[int, Mapping[str, Stack]]
    passes: Mapping[int, PassRows]
    hidden: int
    said: Sequence[int]
    truth: Mapping[int, Mapping[int, Lane]]
    ranks: int

    def shards(self, name: str, held: Sequence[Member], facts: RankFacts) -> Stack | None:
        """The tensor joined, if every rank holds some of its columns."""
        stacks = [self.stacks[m.number][name] for m in held if name in self.stacks[m.number]]
        members = [m for m in held if name in self.stacks[m.number]]
        count = (stacks[0].tensor.chunks or len(self.said) or 1) if name in CHUNKED else 1
        full = count * self.hidden
        width = stacks[0].width if stacks else 0
        if len(stacks) < 2 or len({s.width for s in stacks}) > 1 or width * len(stacks) != full:
            return None
        joined = Shards.of(stacks, self.passes, count)
        lanes = self._lanes(members[0], joined, count)
        found = (
            None if lanes is None else places.blocks(joined, lanes, count * len(stacks), self._noise(joined))
        )
        order = None
        if found is not None:
            order = [place % len(stacks) for place in found.order[: len(stacks)]]
            order = [order.index(k) for k in range(len(stacks))]
            joined = joined.ordered(order)
        facts.shards.append(
            WidthShards(
                name,
                members,
                width // count,
                self.hidden,
                order,
                joined=False,
                error=found.error if found else float("nan"),
                before=found.before if found else float("nan"),
            )
        )
        return joined

    def scattered(self, name: str, held: Sequence[Member], facts: RankFacts) -> Parts | None:
        """Each rank's part under its right labels, if in some phase every rank holds some of the rows."""
        members = [m for m in held if name in self.stacks[m.number]]
        stacks = [self.stacks[m.number][name] for m in members]
        phases = self._phases_in_parts(members, stacks) if len(stacks) > 1 else []
        if not phases:
            return None
        right, moved = [], False
        for member, stack in zip(members, stacks, strict=True):
            fixed = self._relabelled(member, stack)
            moved |= fixed is not None
            right.append(stack if fixed is None else fixed)
        parts = [np.flatnonzero(np.isin(one.keys.phase, phases)) for one in right]
        table = self.trace.ranks[members[0].number]
        order, _ = places.order_of(right[0], places.table_rows(right[0], parts[0]), table, len(members))
        of = sum(len(rows) for rows in parts)
        wholly = of == sum(one.rows for one in right)
        facts.scatters.append(
            Scatter(
                name, members, order, moved, whole=False, rows=len(parts[0]), of=of,
                phases=[] if wholly else phases,
            )
        )  # fmt: skip
        if not wholly:
            # Of phases that every rank holds whole, the first rank's rows will do.
            right[1:] = [Taken.of(one, rows) for one, rows in zip(right[1:], parts[1:], strict=True)]
        return Parts({m.number: one for m, one in zip(members, right, strict=True)}, wholly)

    def _phases_in_parts(self, members: Sequence[Member], stacks: Sequence[Stack]) -> list[int]:
        """The phases in which ranks hold other rows of the same passes, or the same labels though too few "
        "rows for all."""
        base = stacks[0]
        if base.keys.model[0] != stacks[1].keys.model[0]:
            return []
        rank = self.trace.ranks[members[0].number]
        mine = np.asarray(rank.passes["model"])[rank.rows["pass"]] == base.keys.model[0]
        every = np.bincount(np.asarray(rank.passes["phase"])[rank.rows["pass"]][mine], minlength=_PHASES)
        held = [np.bincount(stack.keys.phase, minlength=_PHASES) for stack in stacks]
        usable = [np.bincount(stack.keys.phase[stack.keys.usable], minlength=_PHASES) for stack in stacks]
        holders = np.count_nonzero(usable, axis=0)
        fits = (holders > 1) & (np.sum(held, axis=0) <= (1 + _SHARED) * every)
        if not fits.any():
            # As a rule: ranks that hold all rows need not be joined for this.
            return []
        joined = [join(base, other, self.passes).left for other in stacks[1:]]
        shared = np.max([np.bincount(base.keys.phase[rows], minlength=_PHASES) for rows in joined], axis=0)
        # In passes of few rows some ranks have none.
        least = np.min(np.where(np.equal(usable, 0), np.inf, usable), axis=0)
        apart = shared <= _SHARED * least
        sliced = all(stack.tensor.spread is not None for stack in stacks)
        parts = fits & (apart | sliced)
        # Where passes have one row, one rank has it.
        return [int(phase) for phase in np.flatnonzero(parts | (holders == 1))] if parts.any() else []

    # Rows and columns of a tensor that a rank holds whole

    def put_right(self, member: Member, name: str, facts: RankFacts) -> Stack | None:
        """A tensor of chunks with what is misplaced in it put right; None where nothing is."""
        stack = self.stacks[member.number].get(name)
        if stack is None or stack.width != len(self.said) * self.hidden:
            return None
        lanes = self._lanes(member, stack, len(self.said))
        if lanes is None:
            return None
        noise = self._noise(stack)
        mine = Lane(stack, self.hidden, 0, self.said[0])
        wrong = places.wrong_rows(mine, lanes[0], ROW_ALLOWANCE * noise)
        if len(wrong) <= strays(len(stack.keys.usable)):
            return None
        padding = places.of_padding(mine, wrong, lanes[0], noise)
        if len(padding) > strays(len(stack.keys.usable)):
            return self._without(member, stack, padding, facts)
        if len(wrong) < _HALF * len(stack.keys.usable):
            return None
        return self._columns(member, stack, lanes, facts) or self._order(member, stack, facts)

    def _without(self, member: Member, stack: Stack, padding: Rows, facts: RankFacts) -> Stack:
        example = row_place(stack, self.trace, int(padding[0]))
        facts.paddings.append(Padding(stack.name, member, len(padding), len(stack.keys.usable), example))
        return Taken.of(stack, np.setdiff1d(np.arange(stack.rows), padding))

    def _columns(self, member: Member, stack: Stack, lanes: Sequence[Lane], facts: RankFacts) -> Stack | None:
        count = len(lanes) * self.ranks
        if stack.width % count:
            return None
        found = places.blocks(stack, lanes, count, self._noise(stack))
        if found is None or found.order == list(range(count)):
            return None
        if _only_chunks(found.order, self.ranks):
            # Whole chunks in another order are no matter of ranks.
            return None
        facts.shards.append(
            WidthShards(
                stack.name,
                [member],
                stack.width // count,
                self.hidden,
                found.order,
                joined=True,
                error=found.error,
                before=found.before,
            )
        )
        return Columns.of(stack, [found.order.index(k) for k in range(count)])

    def _order(self, member: Member, stack: Stack, facts: RankFacts) -> Stack | None:
        fixed = self._relabelled(member, stack)
        if fixed is None:
            return None
        table = self.trace.ranks[member.number]
        order, _ = places.order_of(fixed, places.table_rows(fixed, np.arange(fixed.rows)), table, self.ranks)
        if not order:
            return None
        facts.scatters.append(
            Scatter(
                stack.name,
                [member],
                order,
                moved=True,
                whole=True,
                rows=fixed.rows,
                of=fixed.rows,
            )
        )
        return fixed

    def _relabelled(self, member: Member, stack: Stack) -> Stack | None:
        """The rows under the labels of those that they hold; None where their own labels are right."""
        lane = Lane(stack, stack.width if stack.name not in CHUNKED else self.hidden, 0)
        depth = stack.depth
        if stack.name in CHUNKED:
            depth = self.said[0] if self.said else None
        state = self.truth.get(member.number, {}).get(depth) if isinstance(depth, int) else None
        if state is None or state.stack is stack or state.stack.side != stack.side:
            return None
        noise = self._noise(stack)
        wrong = places.wrong_rows(lane, state, ROW_ALLOWANCE * noise)
        if len(wrong) <= strays(len(stack.keys.usable)):
            return None
        found = places.true_rows(lane, state, noise)
        if found is None:
            return None
        there = found >= 0
        keys = narrowed(state.stack.keys, found[there])
        return Taken.of(stack, stack.keys.usable[there], keys)

    def _lanes(self, member: Member, stack: Stack, count: int) -> list[Lane] | None:
        """What the chunks of a tensor should be; None where that is not known of all."""
        truth = self.truth.get(member.number, {})
        if stack.name in CHUNKED:
            depths = list(self.said) if len(self.said) == count else []
        else:
            depths = [stack.depth] if isinstance(stack.depth, int) else []
        lanes = [truth[depth] for depth in depths if depth in truth]
        return lanes if len(lanes) == count else None

    def _noise(self, stack: Stack) -> float:
        return same_process_noise(stack)(0)


def _only_chunks(order: Sequence[int], ranks: int) -> bool:
    """Whether blocks stay together in their chunks, in order."""
    return all(block % ranks == place % ranks for place, block in enumerate(order)) and all(
        order[place] // ranks == order[place - place % ranks] // ranks for place in range(len(order))
    )
