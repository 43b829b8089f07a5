"""One captured draft against its checkpoint: every stage, and what explains those that differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hsprobe.diagnose.draft import attention, direct, hypotheses, linear, recycle
from hsprobe.diagnose.draft.compute import BEFORE, SITES, Variant, computable
from hsprobe.diagnose.draft.hypotheses import Hypothesis
from hsprobe.diagnose.draft.material import Material
from hsprobe.diagnose.draft.model import DraftFindings, StageLine, Verdict
from hsprobe.diagnose.draft.trial import DEPTHS, Errors, Stage, Trier, stages
from hsprobe.diagnose.naming import phase_name
from hsprobe.diagnose.wording import figure
from hsprobe.draft.config import Rope, read_json, rope_of
from hsprobe.draft.reference import load
from hsprobe.draft.timeline import Ints
from hsprobe.errors import HsprobeError
from hsprobe.trace.reader import Trace

_ROWS = 160
"""Most rows of a phase, with and without a prefix hit, that are computed."""
_MOST_KEYS = 400_000
_PARTS = (
    "Several parts of the draft lie between what was captured before and here: capture all of its sites "
    "('--sites aux,layer,draft'), so that each can be held against the checkpoint alone."
)


def examine(trace: Trace, draft: Path | str, target: Path | str | None = None) -> DraftFindings:
    """Hold the draft's rows of a capture against the checkpoint that the draft should be.

    Args:
        trace: of the server.
        draft: folder of the trained draft.
        target: folder of the target; by default the one that the capture names, if it is here.

    Raises:
        HsprobeError: the capture has no rows of a draft, or a folder cannot be read.
    """
    told = trace.provenance.get("model")
    named = told.get("path") if isinstance(told, dict) else None
    if target is None and isinstance(named, str) and Path(named).is_dir():
        target = named
    with torch.no_grad():
        ref = load(target, draft)
        material = Material.of(trace, ref, None if target is None else str(target))
        if material is None or not len(material.rows) or not material.stored:
            raise HsprobeError(
                f"{trace.path} holds no stage of a draft to compare with {draft}.",
                "Capture from a server that speculates, with the draft's sites ('--sites draft').",
            )
        return _Examiner(trace, material, _rope(target)).run(
            str(draft), None if target is None else str(target)
        )


def _rope(target: Path | str | None) -> Rope | None:
    if target is None:
        return None
    try:
        return rope_of(read_json(Path(target) / "config.json"))
    except HsprobeError:
        return None


@dataclass
class _Examiner:
    trace: Trace
    material: Material
    target_rope: Rope | None
    lines: list[StageLine] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def run(self, draft: str, target: str | None) -> DraftFindings:
        material = self.material
        self.notes += material.notes
        self.verdicts += direct.tokens_fed(material)
        self.verdicts += direct.positions_fed(material)
        self.verdicts += direct.fc_passed_by(material, self._watched("draft.fc"))
        sample = self._sample()
        seen = material.rows.seen_by(sample.tolist())
        trier = Trier(material, seen)
        for site in SITES:
            if site in material.stored:
                self._site(site, sample, trier)
        if not any(verdict.kind == "embed" for verdict in self.verdicts):
            self.verdicts += direct.table_passed_over(material)
        lines, verdicts = recycle.recycled(material)
        self.lines += lines
        self.verdicts += verdicts
        self.verdicts += direct.vocabulary(material)
        if material.ref.config.layers > 1:
            self.notes.append("The draft has several layers; of those after the first, none was compared.")
        return DraftFindings(draft, target, self.lines, self.verdicts, self.notes)

    def _watched(self, site: str) -> bool:
        probes = self.trace.provenance.get("probes")
        return isinstance(probes, list) and site in probes

    def _served(self) -> Mapping[str, Any]:
        draft = self.trace.provenance.get("draft")
        config = draft.get("config") if isinstance(draft, dict) else None
        return config if isinstance(config, dict) else {}

    def _sample(self) -> Ints:
        """Rows to compute: of every phase, with and without a prefix hit, evenly spread."""
        rows = self.material.rows
        usable = rows.slot >= 0
        cached = (rows.cached > 0).astype(np.int64)
        chosen: list[Ints] = []
        for phase in np.unique(rows.phase[usable]):
            for hit in (0, 1):
                mine = np.flatnonzero(usable & (rows.phase == phase) & (cached == hit))
                chosen.append(_spread(mine, _ROWS))
        index = np.unique(np.concatenate(chosen)) if chosen else np.zeros(0, np.int64)
        keys = np.cumsum(np.sort(rows.slot[index] + 1))
        if len(keys) and keys[-1] > _MOST_KEYS:
            longest = np.sort(rows.slot[index])[max(1, int(np.searchsorted(keys, _MOST_KEYS))) - 1]
            index = index[rows.slot[index] <= longest]
        return index

    def _site(self, site: str, sample: Ints, trier: Trier) -> None:
        material = self.material
        ready = computable(material, site, trier.seen)[sample] & material.holds(site)[sample]
        index = sample[ready]
        if site == "draft.context":
            self._say_what_lacks(sample, trier)
        if not len(index):
            return
        computed = trier.computed(Variant(material.ref), site, index)
        between = _between(site, material)
        roundings = sum(DEPTHS.get(one, 1) for one in between)
        for stage in stages(site, material, index, roundings):
            finite = np.isfinite(stage.captured).all(axis=1)
            if not finite.all():
                self.notes.append(
                    f"{stage.name}: {int((~finite).sum())} rows are not finite and were left out."
                )
            errors = stage.against(computed)
            self.lines.append(stage.line(errors))
            if not errors.good:
                self.verdicts.append(self._explained(stage, errors, between, trier))

    def _explained(self, stage: Stage, errors: Errors, between: list[str], trier: Trier) -> Verdict:
        def tries(bad: Ints, fine: Ints) -> Iterable[Hypothesis]:
            for site in between:
                yield from hypotheses.of_site(site, self.material)
                if site == "draft.context":
                    yield from attention.of_attention(
                        self.material, self._served(), self.target_rope, bad, fine
                    )

        found = trier.verdict(stage, errors, tries)
        if found is None:
            found = self._in_one_phase(stage, errors, tries, trier)
        if found is None and stage.site == "draft.embed":
            found = direct.other_table(self.material, stage.index, errors.over)
        if found is None:
            found = linear.verdict(stage, errors, between, trier)
        if found is None:
            found = linear.gain(stage, errors, between, trier)
        return found or _unexplained(stage, errors, between)

    def _in_one_phase(self, stage: Stage, errors: Errors, tries: Any, trier: Trier) -> Verdict | None:
        """What explains the rows of the phases that differ, where others are right."""
        for phase in np.unique(stage.phase):
            mine = np.flatnonzero(stage.phase == phase)
            part = Errors(errors.values[mine], errors.expected)
            if part.good or len(mine) == len(stage.index):
                continue
            found = trier.verdict(stage.among(mine), part, tries)
            if found is not None:
                return replace(found, title=f"{found.title}, in {phase_name(int(phase))}")
        return None

    def _say_what_lacks(self, sample: Ints, trier: Trier) -> None:
        rows = self.material.rows
        lacking = [i for i in sample.tolist() if (trier.seen[i] < 0).any()]
        if not lacking:
            return
        hits = sum(1 for i in lacking if rows.cached[i] > 0)
        why = (
            "keys are from a prefix cache that was filled before the capture"
            if hits
            else "earlier rows are missing"
        )
        self.notes.append(
            f"The attention of {len(lacking)} of {len(sample)} draft rows was not computed: their {why}."
        )


def _between(site: str, material: Material) -> list[str]:
    """The sites from the last captured ones up to this one, itself included."""
    found = [site]
    for before in BEFORE.get(site, ()):
        if before not in material.stored and before not in found:
            found = [*(one for one in _between(before, material) if one not in found), *found]
    return sorted(found, key=SITES.index)


def _spread(rows: Ints, count: int) -> Ints:
    return rows if len(rows) <= count else rows[np.linspace(0, len(rows) - 1, count).astype(np.int64)]


def _unexplained(stage: Stage, errors: Errors, between: list[str]) -> Verdict:
    line = stage.line(errors)
    phases = ", ".join(f"{phase} {figure(error)}" for phase, error in line.phases.items())
    return Verdict(
        "unexplained",
        stage.name,
        f"{stage.name} is not what the checkpoint gives, and nothing that was tried explains it",
        proof=[
            f"{stage.name}: error {figure(line.error)}, expected {figure(line.noise)} or less; "
            f"{line.over} of {line.rows} rows differ",
            f"by phase: {phases}",
        ],
        steps=[_PARTS] if len(between) > 1 else [],
        error=line.error,
        before=line.error,
        agree=line.over,
        rows=line.rows,
    )
