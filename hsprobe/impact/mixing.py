"""States that suffer from some of the findings and not from others.

A served chunk is taken apart into what the diagnosis found it to be: a state of some depth, in some form, of
some rows. With all its findings it is the served tensor itself, with none the training side's. With some of
several it is built anew from the stream that the capture holds; where that cannot be done, the findings that
meet in the chunk are only undone together.

Letters: T tokens of a request, K chunks of width H, n rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hsprobe.compare.direct import Lane
from hsprobe.compare.stack import Rows
from hsprobe.compare.statistics import Floats
from hsprobe.diagnose.account import Part
from hsprobe.diagnose.evidence import ChunkEvidence, Evidence
from hsprobe.diagnose.forms import gain, rms_normed
from hsprobe.diagnose.model import Finding
from hsprobe.diagnose.origin import Kind
from hsprobe.diagnose.settle import same_process_noise
from hsprobe.diagnose.sides import Side
from hsprobe.diagnose.stream import Stream, View
from hsprobe.impact.texts import Source, Text

DEPTH, FORM, ROWS, VALUES, HANDOVER = "depth", "form", "rows", "values", "handover"
_ASPECTS = {"HS1": DEPTH, "HS2": FORM, "HS3": ROWS, "HS5": VALUES, "HS6": HANDOVER}
# Not about rows, for all their number: a phase that is handed another depth.
_BY_CODE = {"HS304": DEPTH}
# Term of a form -> depths of the stream and layers of the stream within layers, from the state's depth on.
_NEEDS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "": ((), ()),
    "norm": ((), ()),
    "state": ((), ()),
    "before": ((-1,), ()),
    "block": ((-1,), ()),
    "middle": ((), (-1,)),
    "mlp": ((), (-1,)),
    "attention": ((-1,), (-1,)),
    "next attention": ((), (0,)),
}


def aspect(finding: Finding) -> str | None:
    """What of a state a finding is about; None where it is not about states at all (tokens, the draft)."""
    return _BY_CODE.get(finding.code) or _ASPECTS.get(finding.code[:3])


@dataclass(frozen=True)
class Item:
    """Findings that are undone together, most often one. `findings`: their indexes."""

    findings: frozenset[int]


@dataclass
class Mixer:
    """Makes the states of a text under any set of findings.

    Args:
        stream: the side whose residual stream chunks are built anew from.
        served, trained: where either side's chunks come from.
    """

    findings: Sequence[Finding]
    evidence: Evidence
    stream: Side
    served: Source
    trained: Source

    def __post_init__(self) -> None:
        self._stream = Stream(
            {d: lane for d, lane in self.stream.layers.items() if isinstance(d, int)},
            self.stream.mids,
            same_process_noise(self.served.lanes[0].stack),
        )
        self._about = {f: a for f, one in enumerate(self.findings) if (a := aspect(one)) is not None}
        self._gains: dict[tuple[int, int], Floats] = {}

    @property
    def comparable(self) -> bool:
        """Whether chunk stands against chunk; else the states can only be exchanged as a whole."""
        widths = [[lane.width for lane in source.lanes] for source in (self.served, self.trained)]
        return widths[0] == widths[1]

    def items(self) -> list[Item]:
        """The findings that are about states, those that cannot be taken apart as one."""
        items = [Item(frozenset([f])) for f in self._about]
        again = True
        while again:
            again = False
            for item in items:
                chunk = self._stuck(item.findings)
                if chunk is not None:
                    met = frozenset.union(*(i.findings for i in items if i.findings & self._touching(chunk)))
                    items = [Item(met), *(i for i in items if not i.findings & met)]
                    again = True
                    break
        return sorted(items, key=lambda item: min(item.findings))

    def mix(self, text: Text, served_TKH: Floats, trained_TKH: Floats, active: frozenset[int]) -> Floats:
        """The states with the findings `active` and no others. -> [T, K, H]"""
        everything = frozenset(self._about)
        if active >= everything:
            return served_TKH
        if not active:
            return trained_TKH
        mixed = trained_TKH.copy()
        for k in range(len(self.served.lanes)):
            here = self._touching(k)
            if here and active >= here:
                mixed[:, k] = served_TKH[:, k]
            elif active & here:
                mixed[:, k] = self._built(text, k, active, served_TKH[:, k], trained_TKH[:, k])
        return mixed

    def _touching(self, chunk: int) -> frozenset[int]:
        """The findings that bear on a chunk; one that names no chunk bears on all."""
        return frozenset(
            f for f in self._about if not self.findings[f].chunks or chunk in self.findings[f].chunks
        )

    def _stuck(self, item: frozenset[int]) -> int | None:
        """A chunk in which these findings can be neither undone nor left alone; None where all goes well."""
        for k in range(len(self.served.lanes)):
            here = self._touching(k)
            for active in (here & item, here - item):
                if active and active != here and not self._can_build(k, active):
                    return k
        return None

    def _can_build(self, k: int, active: frozenset[int]) -> bool:
        chunk = next((c for c in self.evidence.chunks if c.line.index == k), None)
        whats = [self._about[f] for f in self._touching(k)]
        if not self.comparable or chunk is None or chunk.trained or not chunk.depths:
            return False
        if len(set(whats)) < len(whats) or not set(whats) <= {DEPTH, FORM, ROWS}:
            return False
        return all(self._recipe(chunk, phase, active) is not None for phase in chunk.depths)

    def _recipe(self, chunk: ChunkEvidence, phase: int, active: frozenset[int]) -> _Recipe | None:
        """How the rows of a phase are made with some of the chunk's findings; None where they cannot be."""
        on = {self._about[f] for f in active}
        part = next((p for p in chunk.served if p.phase == phase), Part(phase, 0))
        found, wanted = chunk.depths.get(phase), chunk.line.trained
        depth = found if DEPTH in on else wanted
        offset = 0
        if ROWS in on and part.origin is not None:
            if part.origin.kind is not Kind.OFFSET:
                return None
            offset = part.origin.offset
        form = part.form if FORM in on else None
        if not isinstance(depth, int) or not isinstance(found, int) or depth not in self._stream.states:
            return None
        if form is not None and not self._has_terms(form.term, depth):
            return None
        return _Recipe(depth, offset, part, form is not None, found)

    def _has_terms(self, term: str, depth: int) -> bool:
        """Whether the capture holds what a form's term is made of."""
        if term not in _NEEDS:
            return False
        states, mids = _NEEDS[term]
        return all(depth + d in self._stream.states for d in states) and all(
            depth + d in self._stream.mids for d in mids
        )

    def _built(
        self, text: Text, k: int, active: frozenset[int], served_TH: Floats, trained_TH: Floats
    ) -> Floats:
        chunk = next(c for c in self.evidence.chunks if c.line.index == k)
        lane = self.served.lanes[k]
        rows_T = self.served.rows(text, lane)
        out = trained_TH.copy()
        for phase in chunk.depths:
            recipe = self._recipe(chunk, phase, active & self._touching(k))
            at = np.flatnonzero((rows_T >= 0) & (lane.stack.keys.phase[np.maximum(rows_T, 0)] == phase))
            if recipe is None or not len(at):
                continue
            order = np.argsort(rows_T[at], kind="stable")
            at = at[order]
            made = self._make(recipe, lane, rows_T[at], k)
            whole = np.isfinite(made).all(axis=1)
            # At the edge of a request there is no row to move in; the served one stands there.
            made[~whole] = served_TH[at[~whole]]
            out[at] = made
        return out

    def _make(self, recipe: _Recipe, lane: Lane, rows: Rows, k: int) -> Floats:
        view = View(lane.stack, rows)
        around = view.around(self._stream, recipe.depth, recipe.offset)
        if around is None:
            return np.full((len(rows), lane.width), np.nan, np.float32)
        form = recipe.part.form
        if not recipe.formed or not form.term:
            return around.state
        if form.normed:
            return rms_normed(around.state) * self._gain(recipe, lane, k)
        term = around.terms.get(form.term)
        if term is None:
            return np.full_like(around.state, np.nan)
        made: Floats = form.base * around.state + np.float32(form.factor) * term[0]
        return made

    def _gain(self, recipe: _Recipe, lane: Lane, k: int) -> Floats:
        """The gain of the norm that the served rows of a phase went through. -> [H]"""
        key = k, recipe.part.phase
        if key not in self._gains:
            keys = lane.stack.keys
            rows = keys.usable[keys.phase[keys.usable] == recipe.part.phase][:512]
            offset = recipe.part.origin.offset if recipe.part.origin is not None else 0
            state = View(lane.stack, rows).read(self._stream.states[recipe.found], offset)
            self._gains[key] = gain(lane.of(lane.stack.read(rows)), rms_normed(state))
        return self._gains[key]


@dataclass(frozen=True)
class _Recipe:
    """Rows of one phase: the state of `depth`, `offset` positions on, in the part's form where `formed`.

    `found`: the depth that the served rows hold, from which a norm's gain is fitted.
    """

    depth: int
    offset: int
    part: Part
    formed: bool
    found: int


def named(items: Iterable[int], findings: Sequence[Finding]) -> tuple[list[str], list[str]]:
    """(codes, titles) of findings by index."""
    chosen = [findings[f] for f in sorted(items)]
    return [f"{one.code} {one.name}" for one in chosen], [one.title for one in chosen]
