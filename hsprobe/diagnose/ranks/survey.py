"""Look at the ranks of a trace, and make of them the one side that the rest of the diagnosis compares."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hsprobe.compare.direct import Lane
from hsprobe.compare.noise import coarsest, expected_error
from hsprobe.compare.ranks import Changed, Mean, Member, PassRows, Reader, Together, groups, members
from hsprobe.compare.stack import Stack, stacks_of
from hsprobe.diagnose.evidence import Serving
from hsprobe.diagnose.model import Depth
from hsprobe.diagnose.ranks.facts import PartialSum, RankComparison, RankFacts, SiteDifference
from hsprobe.diagnose.ranks.partial import Question, merged, partial_sum, summed
from hsprobe.diagnose.ranks.placement import Placement
from hsprobe.diagnose.ranks.replicas import CHUNKED, Replicas, equal_ranks
from hsprobe.diagnose.ranks.stages import notes, stages
from hsprobe.diagnose.settle import same_process_noise
from hsprobe.diagnose.sides import Side, open_side, served_depths
from hsprobe.diagnose.stream import Stream
from hsprobe.trace.reader import Trace
from hsprobe.trace.schema import SPREAD_COLUMNS, Phase

_MOST_CHUNKS = 65


@dataclass
class Survey:
    """The ranks of one trace.

    Args:
        name: "train" or "infer".
        reference: the other side, as a whole; None where there is none.
    """

    trace: Trace
    name: str
    reference: Side | None = None
    _fixed: dict[tuple[int, str], Stack] = field(default_factory=dict)
    _spread: set[str] = field(default_factory=set)
    _speakers: dict[tuple[int, int], Member] = field(default_factory=dict)

    def run(self) -> tuple[Side, RankFacts]:
        """The side that speaks for all ranks, and what is known of each.

        Raises:
            HsprobeError: nothing was captured.
        """
        facts = RankFacts(self.name, self.members, self._size())
        if not facts.several:
            return self.whole, facts
        for group in groups(self.members):
            self._group(group, facts)
        facts.partials = merged(facts.partials)
        side = self.side()
        facts.stages = stages(self.members, self.stacks, self.whole.hidden, self.claimed)
        facts.notes += notes(facts)
        return side, facts

    def side(self) -> Side:
        """The side that speaks for all ranks."""
        chosen: dict[str, list[int]] = {}
        for group in groups(self.members):
            held = [m for m in group if self.stacks[m.number]]
            speaker = self._speakers.get((group[0].dp, group[0].pp))
            for name in sorted({name for m in held for name in self.stacks[m.number]}):
                having = [m for m in held if name in self.stacks[m.number]]
                if name not in self._spread:
                    having = [m for m in having if m == speaker][:1] or having[:1]
                chosen.setdefault(name, []).extend(m.number for m in having)
        return self._side(chosen)

    def _side(self, chosen: Mapping[str, Sequence[int]]) -> Side:
        """These ranks' tensors, put right where that is possible."""
        stacks = stacks_of(self.trace, self.name, chosen)
        for name, numbers in chosen.items():
            if any((number, name) in self._fixed for number in numbers):
                parts = [self._fixed.get((n, name), self.stacks[n].get(name)) for n in numbers]
                known = [part for part in parts if part is not None]
                stacks[name] = known[0] if len(known) == 1 else Together.of(known)
        return open_side(self.trace, self.name, stacks, self.whole.hidden)

    def speak(self, member: Member) -> None:
        """Let a rank speak for its group."""
        self._speakers[member.dp, member.pp] = member

    def speaks(self, member: Member) -> bool:
        """Whether a rank speaks for its group."""
        return self._speakers.get((member.dp, member.pp)) == member

    @cached_property
    def members(self) -> list[Member]:
        return members(self.trace)

    @cached_property
    def whole(self) -> Side:
        """All ranks as one."""
        return open_side(self.trace, self.name, None, self._declared_width())

    @cached_property
    def stacks(self) -> dict[int, dict[str, Stack]]:
        """Number of a rank -> its tensors that have rows to compare."""
        found = {m.number: stacks_of(self.trace, self.name, [m.number]) for m in self.members}
        return {n: {k: s for k, s in own.items() if len(s.keys.usable)} for n, own in found.items()}

    @cached_property
    def passes(self) -> dict[int, PassRows]:
        return {m.number: PassRows(self.trace.ranks[m.number]) for m in self.members}

    @cached_property
    def replicas(self) -> Replicas:
        side = self.whole
        return Replicas(
            self.trace, self.stacks, self.passes, self.claimed, side.hidden, side.num_layers, side.model_dtype
        )

    @cached_property
    def claimed(self) -> list[Depth]:
        """The depths that the chunks are said to have, of however many chunks."""
        serving, stack = Serving.of(self.trace.provenance), self.whole.chunked()
        for count in range(1, _MOST_CHUNKS):
            said = served_depths(serving, stack, count)
            if None not in said:
                return said
        return []

    @cached_property
    def placement(self) -> Placement:
        said = [depth for depth in self.claimed if isinstance(depth, int)]
        others = {} if self.reference is None else _states(self.reference)
        truth = {m.number: {**others, **self._wide(m)} for m in self.members}
        return Placement(self.trace, self.stacks, self.passes, self.whole.hidden, said, truth, self._size())

    def _wide(self, member: Member) -> dict[int, Lane]:
        """A rank's own stream, where it holds all columns."""
        found = {}
        for one in self.members:
            if (one.dp, one.tp) == (member.dp, member.tp):
                found.update(_streamed(self.stacks[one.number].values(), self.whole.hidden))
        return found

    def side_of(self, member: Member) -> Side:
        """What one rank holds by itself, with the other pipeline stages of its place."""
        near = [m for m in self.members if (m.dp, m.tp) == (member.dp, member.tp) or m == member]
        chosen: dict[str, list[int]] = {}
        for one in near:
            for name in self.stacks[one.number]:
                chosen.setdefault(name, []).append(one.number)
        return self._side(chosen)

    # One group of ranks that should hold the same

    def _group(self, group: list[Member], facts: RankFacts) -> None:
        held = [member for member in group if self.stacks[member.number]]
        if not held:
            return
        names = sorted(
            {
                name
                for member in held
                for name, stack in self.stacks[member.number].items()
                # Columns that ranks share out by design are no replicas.
                if stack.tensor.spread != SPREAD_COLUMNS
            }
        )
        sites = [name for name in names if not self._in_parts(name, held, facts)]
        classes, made = equal_ranks(held, lambda a, b: self.replicas.compare(a, b, sites))
        facts.classes.append(classes)
        facts.comparisons += made
        for one in classes:
            self._misplaced(one, facts)
        if len(classes) > 1:
            self._differing(held, classes, made, facts)
        self.speak(max(classes, key=len)[0])

    def _in_parts(self, name: str, held: list[Member], facts: RankFacts) -> bool:
        """Whether ranks hold parts of a tensor; they are then put together."""
        joined = self.placement.shards(name, held, facts)
        if joined is not None:
            self._fixed.update({(member.number, name): joined for member in held})
            return True
        parts = self.placement.scattered(name, held, facts)
        if parts is None:
            return False
        self._spread.add(name)
        self._fixed.update({(number, name): stack for number, stack in parts.stacks.items()})
        # Rows that ranks hold in common, those of other phases, are still to be equal.
        return parts.wholly

    def _misplaced(self, equal: list[Member], facts: RankFacts) -> None:
        """What stands elsewhere than it should in tensors that a rank holds whole; equal ranks hold the "
        "same."""
        known = RankFacts(self.name, self.members)
        for name in CHUNKED:
            right = self.placement.put_right(equal[0], name, known)
            if right is not None:
                self._fixed[equal[0].number, name] = right
        shown = {one.name for one in known.shards} | {one.name for one in known.scatters}
        shown |= {one.name for one in known.paddings}
        first = next((name for name in CHUNKED if name in shown), "")
        facts.shards += [replace(one, members=equal) for one in known.shards if one.name == first]
        facts.scatters += [replace(one, members=equal) for one in known.scatters if one.name == first]
        facts.paddings += [one for one in known.paddings if one.name == first]
        if shown:
            facts.named |= {member.number for member in equal}

    def _differing(
        self,
        held: list[Member],
        classes: list[list[Member]],
        made: list[RankComparison],
        facts: RankFacts,
    ) -> None:
        bad = [site for one in made for site in one.bad]
        places = [site.place for site in bad if site.place is not None]
        start = min(places, default=None)
        if start is not None:
            first = next(site for site in bad if site.place == start)
            asked = [first]
        else:
            # What the draft is handed is what the target put out: one fault, told once.
            name = next((name for name in CHUNKED if any(site.name == name for site in bad)), "")
            asked = list({site.site: site for site in bad if site.name == name}.values())
        found = []
        for site in asked:
            question = self._question(held, classes, site, start)
            answer = partial_sum(question, self.passes) if question is not None else None
            if answer is not None:
                found.append(answer)
        facts.partials += found
        if start is None and found:
            self._put_right(held, found)

    def _question(
        self,
        held: list[Member],
        classes: list[list[Member]],
        site: SiteDifference,
        start: int | None,
    ) -> Question | None:
        name, chunk = site.name, site.chunk
        holders = [m for m in held if name in self.stacks[m.number]]
        lanes = [self._lane(m, name, chunk) for m in holders]
        if len(lanes) < 2 or len({lane.stack.width for lane in lanes}) > 1:
            return None
        speakers = [holders.index(one[0]) for one in classes if one[0] in holders]
        streams = self._streams(held[0], start)
        depth = lanes[0].depth
        prefer = [depth] if isinstance(depth, int) else []
        if start is not None:
            prefer = [(start + 1) // 2]
        own = [self._stream(m, start) if start is None else Stream({}, {}, _nothing) for m in holders]
        return Question(
            site.site, chunk, holders, lanes, speakers, [own[s] for s in speakers], streams, prefer
        )

    def _lane(self, member: Member, name: str, chunk: int | None) -> Lane:
        lanes = self.replicas.lanes(self.stacks[member.number][name])
        return lanes[0] if chunk is None else lanes[chunk]

    def _stream(self, member: Member, end: int | None) -> Stream:
        """A rank's own stream, before the place from which ranks differ."""
        side = self.side_of(member)
        states = {
            depth: lane
            for depth, lane in side.layers.items()
            if isinstance(depth, int) and (end is None or 2 * depth < end)
        }
        mids = {k: lane for k, lane in side.mids.items() if end is None or 2 * k + 1 < end}
        some = next(iter(side.stacks.values()))
        return Stream(states, mids, same_process_noise(some))

    def _streams(self, member: Member, start: int | None) -> list[tuple[str, Stream]]:
        own = self._stream(member, start)
        if start is None and own.states:
            return [(self.name, own)]
        if self.reference is None:
            return []
        noise = self._noise(self.reference)
        other = "train" if self.name == "infer" else "infer"
        theirs = _states(self.reference)
        if start is None:
            return [(other, Stream(theirs, self.reference.mids, noise))]
        if start % 2:
            # Within a layer: the stream after its attention is the state, the layer's input before it.
            middle = self.reference.mids.get(start // 2)
            states = {} if middle is None else {start // 2 + 1: middle}
            return [(other, Stream({**own.states, **states}, {}, noise))] if states else []
        depth = start // 2
        states = {d: lane for d, lane in theirs.items() if d == depth}
        return [(other, Stream({**own.states, **states}, own.mids, noise))] if states else []

    def _noise(self, other: Side) -> _Noise:
        return _Noise(coarsest(self.whole.model_dtype, other.model_dtype, *_dtypes(self.whole, other)))

    def _put_right(self, held: list[Member], found: Sequence[PartialSum]) -> None:
        """Let the sums that were not taken stand where the parts do, so that other faults can be told."""
        own = self._stream(held[0], None)
        for name in CHUNKED:
            stacks = [self.stacks[m.number][name] for m in held if name in self.stacks[m.number]]
            if len({stack.width for stack in stacks}) != 1:
                continue
            mean = Mean.of(stacks, self.passes)
            swaps: dict[int, Reader] = {}
            for answer in found:
                reader = summed(mean, answer, own) if answer.source == self.name else None
                if reader is not None:
                    reader.phases = answer.phases
                    if name != CHUNKED[0]:
                        # The draft's own passes stand for the target's, of the rows handed on.
                        reader.phases = _drafted(answer.phases)
                        reader.contexts = self._contexts(held[0], answer.phases)
                    swaps[answer.chunks[0]] = reader
            if swaps:
                whole = Changed.of(mean, swaps, self.whole.hidden)
                self._fixed.update({(member.number, name): whole for member in held})

    def _contexts(self, member: Member, phases: Sequence[int]) -> NDArray[np.uint64] | None:
        """Contexts of the rows that the target handed over in these phases; None where not captured."""
        stack = self.stacks[member.number].get(CHUNKED[0])
        return None if stack is None else stack.keys.context[np.isin(stack.keys.phase, phases)]

    # What is said of all ranks

    def _size(self) -> int:
        """How many ranks share a sum."""
        recorded = max((len(group) for group in groups(self.members)), default=1)
        sizes = [
            rank.coords.get("attn_tp_size") or rank.coords.get("tp_size") or 1 for rank in self.trace.ranks
        ]
        arguments = self.trace.provenance.get("server_args")
        said = arguments.get("tp_size") if isinstance(arguments, dict) else None
        return max(recorded, *sizes, said if isinstance(said, int) and 0 < said < 1 << 16 else 1)

    def _declared_width(self) -> int | None:
        """H as the model's configuration has it, where tensors of several ranks are narrower."""
        model = self.trace.provenance.get("model")
        hidden = model.get("hidden_size") if isinstance(model, dict) else None
        several = len(self.trace.ranks) > 1
        return hidden if several and type(hidden) is int and hidden > 0 else None


@dataclass(frozen=True)
class _Noise:
    dtype: str

    def __call__(self, depth: int) -> float:
        return expected_error(self.dtype, max(depth, 0))


def _nothing(depth: int) -> float:
    return 0.0


def _dtypes(*sides: Side) -> Iterable[str]:
    return (stack.dtype for side in sides for stack in side.stacks.values())


def _drafted(phases: Sequence[int]) -> list[int]:
    """The phases of the draft's passes over rows of these phases of the target."""
    return [int(Phase.PREFILL if phase == int(Phase.PREFILL) else Phase.DRAFT_EXTEND) for phase in phases]


def _streamed(stacks: Iterable[Stack], hidden: int) -> dict[int, Lane]:
    return {
        stack.depth: Lane(stack, hidden, depth=stack.depth)
        for stack in stacks
        if stack.tensor.site == "layer" and isinstance(stack.depth, int) and stack.width == hidden
    }


def _states(side: Side) -> dict[int, Lane]:
    """Depth -> lane, from the stream or else from chunks that a dump declares."""
    found: dict[int, Lane] = {d: lane for d, lane in side.layers.items() if isinstance(d, int)}
    stack = side.chunked()
    for k, depth in enumerate(stack.tensor.depths or [] if stack is not None else []):
        if stack is not None and isinstance(depth, int) and stack.width % side.hidden == 0:
            found.setdefault(depth, Lane(stack, side.hidden, k, depth))
    return found
