"""Which depths stand where: an order, a shift, or a set that differs, told apart by the shortest account."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hsprobe.diagnose.evidence import ChunkEvidence, Evidence
from hsprobe.diagnose.model import ChunkLine, State

# Conventions differ by one, a correction applied twice by two; more is another set of layers.
_LARGEST = 2


@dataclass(frozen=True)
class Wiring:
    """How the served depths differ from those trained on.

    Attributes:
        order: served position -> training chunk; None where the order is right.
        shift: by how many layers all chunks are off, 0 for none.
        wrong: chunks of a wrong depth that neither order nor shift accounts for.
        moved: chunks that the order moves. shifted: chunks that the shift moves.
        by_account: the served depths are what the server says, not what was found.
    """

    order: list[int] | None = None
    shift: int = 0
    wrong: list[ChunkLine] = field(default_factory=list)
    moved: list[ChunkLine] = field(default_factory=list)
    shifted: list[ChunkLine] = field(default_factory=list)
    by_account: bool = False


def wiring(evidence: Evidence) -> Wiring:
    """The shortest account of the depths of all chunks."""
    known = [(chunk.line, *_depths(evidence, chunk)) for chunk in evidence.chunks if not mixed(chunk)]
    pairs = [(line, trained, served) for line, trained, served in known if served is not None]
    if not pairs:
        return Wiring()
    by_account = any(_claimed(evidence, line) is not None for line, _, _ in pairs)
    lines = [line for line, _, _ in pairs]
    trained, served = [t for _, t, _ in pairs], [s for _, _, s in pairs]
    if evidence.trained_chunks != evidence.served_chunks:
        return Wiring(shift=_subset_shift(evidence), shifted=lines)
    normed = {k for k, line in enumerate(lines) if line.served == "final" or "final norm" in line.form}
    ids = [k for k in range(len(lines)) if k not in normed]
    whole = len(pairs) == len(evidence.chunks)
    straight = _account(trained, served, list(range(len(lines))), ids if whole else [])
    order = _order(trained, served) if whole else None
    if order is not None:
        turned = _account(trained, served, order, ids)
        if 1 + turned.cost < straight.cost:
            moved = [lines[k] for k, j in enumerate(order) if j != k]
            return _wiring(lines, turned, order, moved, by_account)
    return _wiring(lines, straight, None, [], by_account)


@dataclass(frozen=True)
class _Account:
    shift: int
    wrong: list[int]

    @property
    def cost(self) -> int:
        return 1 if self.shift else len(self.wrong)


def _wiring(
    lines: Sequence[ChunkLine],
    account: _Account,
    order: list[int] | None,
    moved: list[ChunkLine],
    by_account: bool,
) -> Wiring:
    wrong = [lines[k] for k in account.wrong]
    if account.shift:
        return Wiring(order, account.shift, [], moved, wrong, by_account)
    return Wiring(order, 0, wrong, moved, [], by_account)


def _account(
    trained: Sequence[int], served: Sequence[int], order: Sequence[int], ids: Sequence[int]
) -> _Account:
    """What is wrong once the chunks are in this order. `ids`: chunks whose depths follow from layer ids."""
    wrong = [k for k, j in enumerate(order) if served[k] != trained[j]]
    offsets = {served[k] - trained[order[k]] for k in ids}
    natural = all(trained[order[k]] >= 0 and served[k] >= 0 for k in ids)
    if wrong and natural and len(offsets) == 1 and set(wrong) <= set(ids):
        offset = offsets.pop()
        if 0 < abs(offset) <= _LARGEST:
            return _Account(offset, wrong)
    return _Account(0, wrong)


def _order(trained: Sequence[int], served: Sequence[int]) -> list[int] | None:
    """Served position -> training chunk of the same rank; None where that is no other order."""
    if len(set(trained)) != len(trained) or len(set(served)) != len(served):
        return None
    by_rank = sorted(range(len(trained)), key=lambda j: trained[j])
    ranks = sorted(range(len(served)), key=lambda k: served[k])
    order = [0] * len(served)
    for rank, k in enumerate(ranks):
        order[k] = by_rank[rank]
    return order if order != list(range(len(order))) else None


def _depths(evidence: Evidence, chunk: ChunkEvidence) -> tuple[int, int | None]:
    """(trained, served) depth of a chunk as numbers; unknown ones are numbered by their chunk, below zero."""
    line = chunk.line
    trained = _number(evidence, line.trained, line.index)
    if line.state in (State.OK, State.NO_ROWS):
        return trained, trained
    if line.served_chunk is not None:
        other = next((one for one in evidence.lines if one.index == line.served_chunk), None)
        return trained, _number(evidence, other.trained if other else None, line.served_chunk)
    if line.served is not None:
        return trained, _number(evidence, line.served, line.index)
    if line.state in (State.SOME_ROWS, State.DIFFERENT, State.FORM, State.ROWS):
        return trained, trained
    return trained, _claimed(evidence, line)


def _number(evidence: Evidence, depth: int | str | None, index: int) -> int:
    if isinstance(depth, int):
        return depth
    if depth == "final":
        return evidence.num_layers if evidence.num_layers is not None else 1 << 20
    return -1 - index


def _claimed(evidence: Evidence, line: ChunkLine) -> int | None:
    """The depth that the server says, where no depth was captured that could tell."""
    unknown = line.state is State.UNKNOWN and not evidence.has_depths
    claim = evidence.claimed_depths[line.index] if line.index < len(evidence.claimed_depths) else None
    if (
        not unknown
        or not isinstance(claim, int)
        or not isinstance(line.trained, int)
        or claim == line.trained
    ):
        return None
    return claim


def mixed(chunk: ChunkEvidence) -> bool:
    """Whether a chunk holds one depth in one phase and another in another."""
    known = {depth for depth in chunk.depths.values() if depth is not None}
    if len(known) > 1:
        return True
    states = {phase.state for phase in chunk.line.phases if phase.state is not State.NO_ROWS}
    return not chunk.depths and State.OK in states and State.WRONG in states


def _subset_shift(evidence: Evidence) -> int:
    """With chunks missing or too many: the shift under which the others are all there, 0 without one."""
    served = [d for d in evidence.all_served if isinstance(d, int)]
    trained = [d for d in evidence.trained_depths if isinstance(d, int)]
    if len(served) != evidence.served_chunks or len(trained) != evidence.trained_chunks:
        return 0
    few, many = sorted((set(served), set(trained)), key=len)
    if few <= many:
        return 0
    sign = 1 if few == set(served) else -1
    for offset in (1, -1, 2, -2):
        if {depth - sign * offset for depth in few} <= many:
            return offset
    return 0
