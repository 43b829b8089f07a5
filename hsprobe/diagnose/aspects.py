"""Findings about the form of states and the origin of rows: what their fault classes share.

A chunk may be wrong in several ways at once, each named by its own class: which depth (`wiring`), in which
form, of which rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hsprobe.diagnose.account import Part
from hsprobe.diagnose.evidence import ChunkEvidence, Evidence
from hsprobe.diagnose.explanation import Explanation
from hsprobe.diagnose.model import Finding, Mend
from hsprobe.diagnose.naming import depth_name, listed, numbers, phase_name
from hsprobe.diagnose.origin import Kind
from hsprobe.diagnose.wording import figure


@dataclass(frozen=True)
class Group:
    """The parts of chunks, all of one side, that show one fault."""

    side: str
    chunks: list[ChunkEvidence]
    parts: list[Part]

    @property
    def indexes(self) -> list[int]:
        return [chunk.line.index for chunk in self.chunks]

    @property
    def subject(self) -> str:
        """`aux chunk 0`, `aux chunks 0 and 1`, `chunk 0 of the training dump`."""
        noun = f"{'chunk' if len(self.chunks) == 1 else 'chunks'} {numbers(self.indexes)}"
        return f"aux {noun}" if self.side == "infer" else f"{noun} of the training dump"

    def verb(self, one: str, many: str) -> str:
        return one if len(self.chunks) == 1 else many

    @property
    def phases(self) -> str:
        """` (in verify)`; empty where all phases show it."""
        shown = {part.phase for part in self.parts}
        all_phases = {phase for chunk in self.chunks for phase in chunk.direct.by_phase}
        if self.side == "train" or shown >= all_phases:
            return ""
        return f" in {numbers_of(phase_name(phase) for phase in sorted(shown))}"


# Terms of which a rank can hold the whole; each may come to be summed over the ranks.
_SUMMED = ("mlp", "attention", "block", "state", "middle", "before")


def summed_over_ranks(evidence: Evidence, part: Part) -> bool:
    """Whether a term is in the state as many times as there are ranks that share a sum."""
    form, ranks = part.form, evidence.summed_ranks
    return ranks > 1 and form.base == 1.0 and form.term in _SUMMED and form.factor + 1 == ranks


def numbers_of(words: Iterable[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    found = list(words)
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} and {found[-1]}"


def groups(evidence: Evidence, wanted: Callable[[Part], bool]) -> list[Group]:
    """The parts that show a fault, one group a side."""
    found = []
    for side in ("infer", "train"):
        chunks, parts = [], []
        for chunk in evidence.chunks:
            mine = [part for part in (chunk.served if side == "infer" else chunk.trained) if wanted(part)]
            if mine:
                chunks.append(chunk)
                parts += mine
        if chunks:
            found.append(Group(side, chunks, parts))
    return found


def form_findings(
    evidence: Evidence,
    about: Explanation,
    rank: int,
    mend: Callable[[Group], Mend] | None = None,
    wanted: Callable[[Part], bool] | None = None,
) -> list[Finding]:
    """One finding a side for chunks whose form of the state is this class's.

    Args:
        wanted: whether a part is; by default those whose form the class proposed, but for terms that count
            once for each rank.
    """
    found = []

    def proposed(part: Part) -> bool:
        return part.form.code == about.code and not summed_over_ranks(evidence, part)

    for group in groups(evidence, wanted or proposed):
        part = group.parts[0]
        found.append(
            about.finding(
                f"{group.subject} {_what(group.parts)}{group.phases}",
                rank=rank,
                confidence=_confidence(group.parts),
                evidence=_form_evidence(group, part),
                mend=mend(group) if mend else None,
                chunks=group.indexes,
                agree=_fitting(group.parts),
                rows=_tried(group.parts),
            )
        )
    return found


def _what(parts: Sequence[Part]) -> str:
    """`is depth 3 (...) without ...`, `are depths 3, 6, 8, each without ...`."""
    if len({_words(part) for part in parts}) == 1:
        return f"is {_words(parts[0])}"
    general = dict.fromkeys(part.form.general for part in parts)
    depths = dict.fromkeys(part.reading.depth for part in parts if part.reading is not None)
    if len(general) == 1:
        return f"are depths {listed(depths)}, each {next(iter(general))}"
    return f"are {', '.join(dict.fromkeys(_words(part) for part in parts))}"


def _words(part: Part) -> str:
    assert part.reading is not None
    return f"{depth_name(part.reading.depth)} {part.reading.words}"


def _form_evidence(group: Group, part: Part) -> list[str]:
    proof = []
    seen: set[tuple[int, str]] = set()
    for chunk in group.chunks:
        for one in chunk.served if group.side == "infer" else chunk.trained:
            if one.reading is None or one.form.code != part.form.code:
                continue
            key = (chunk.line.index, one.reading.words)
            if key not in seen:
                seen.add(key)
                fit = one.reading.fit
                proof.append(
                    f"chunk {chunk.line.index} = {_words(one)}: error {figure(fit.error)}, "
                    f"rounding {figure(fit.expected)}; as the state itself {figure(chunk.line.error)}"
                )
    proof += list(dict.fromkeys(one.note for one in group.parts if one.note))
    rivals = dict.fromkeys(rival for one in group.parts if one.reading for rival in one.reading.rivals)
    proof += [f"the same numbers as: {rival}" for rival in list(rivals)[:2]]
    return proof


def _confidence(parts: Sequence[Part]) -> float:
    return min(part.reading.fit.share if part.reading else 1.0 for part in parts)


def _fitting(parts: Sequence[Part]) -> int:
    return round(sum(part.reading.fit.share * part.reading.fit.rows for part in parts if part.reading))


def _tried(parts: Sequence[Part]) -> int:
    return sum(part.reading.fit.rows for part in parts if part.reading)


def row_findings(
    evidence: Evidence,
    about: Explanation,
    rank: int,
    kinds: Sequence[Kind],
    title: Callable[[Group], str],
    mend: Callable[[Group], Mend] | None = None,
) -> list[Finding]:
    """One finding a side for chunks whose rows come from where this class says."""
    found = []
    for group in groups(evidence, lambda part: part.origin is not None and part.origin.kind in kinds):
        origins = [part.origin for part in group.parts if part.origin is not None]
        examples = dict.fromkeys(one.example for one in origins if one.example)
        bad = {chunk.line.index: sum(p.rows for p in _of(chunk, group.side)) for chunk in group.chunks}
        compared = max(chunk.line.compared for chunk in group.chunks)
        proof = [f"{max(bad.values()):,} of {compared:,} rows are not their own", *list(examples)[:2]]
        found.append(
            about.finding(
                f"{title(group)}{group.phases}",
                rank=rank,
                confidence=min(one.rows / max(one.of, 1) for one in origins),
                evidence=proof,
                mend=mend(group) if mend else None,
                chunks=group.indexes,
                agree=sum(one.rows for one in origins),
                rows=sum(one.of for one in origins),
                tally="rows found elsewhere",
            )
        )
    return found


def _of(chunk: ChunkEvidence, side: str) -> list[Part]:
    return chunk.served if side == "infer" else chunk.trained
