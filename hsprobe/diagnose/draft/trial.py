"""Hold a stage against what it should be, and where it differs against every hypothesis.

Shapes: n rows, W width of a site or of the part of it that is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hsprobe.compare.noise import MEDIAN_ALLOWANCE, ROW_ALLOWANCE, expected_error, strays
from hsprobe.compare.statistics import Floats, channel_scale, row_errors
from hsprobe.diagnose.draft.compute import Computer, Variant
from hsprobe.diagnose.draft.hypotheses import Hypothesis
from hsprobe.diagnose.draft.material import Mask, Material
from hsprobe.diagnose.draft.model import StageLine, Verdict
from hsprobe.diagnose.naming import phase_name
from hsprobe.diagnose.wording import figure
from hsprobe.draft.timeline import Ints

_QUICK_BAD, _QUICK_FINE = 12, 6
# A wrong hypothesis may come near; it must leave this many times the noise to count as told apart.
_APART = 10.0
_SURE = 0.5

DEPTHS = {"draft.embed": 0, "draft.context": 4, "draft.gate_up": 2, "draft.layer": 3}
"""How many roundings lie between a site and the one before it, where it is not one."""


@dataclass(frozen=True)
class Errors:
    """Row errors of a stage. [n], with NaN where a row is not finite."""

    values: Floats
    expected: float

    @property
    def finite(self) -> Floats:
        found: Floats = self.values[np.isfinite(self.values)]
        return found

    @property
    def median(self) -> float:
        return float(np.median(self.finite)) if len(self.finite) else float("nan")

    @property
    def over(self) -> Mask:
        """[n] rows that differ by more than a single row may."""
        with np.errstate(invalid="ignore"):
            mask: Mask = self.values > ROW_ALLOWANCE * self.expected
        return mask

    @property
    def good(self) -> bool:
        """Whether these are two faithful computations of the same."""
        count = len(self.finite)
        if not count:
            return True
        return self.median <= MEDIAN_ALLOWANCE * self.expected and int(self.over.sum()) <= strays(count)


@dataclass
class Stage:
    """Rows of a site, or of a part of it, as captured.

    Attributes:
        name: `draft.qkv k`. index: [n] rows of the draft. part: its columns. captured: [n, W].
    """

    name: str
    site: str
    index: Ints
    part: slice
    captured: Floats
    scale: Floats
    expected: float
    phase: NDArray[np.int64]

    def against(self, computed_nW: Tensor, rows: Ints | None = None) -> Errors:
        """Row errors of the captured rows (of `rows` among them) against computed ones of the whole site."""
        ours = self.captured if rows is None else self.captured[rows]
        return Errors(row_errors(ours, computed_nW[:, self.part].numpy(), self.scale), self.expected)

    def among(self, rows: Ints) -> Stage:
        """Some rows of it."""
        return replace(self, index=self.index[rows], captured=self.captured[rows], phase=self.phase[rows])

    def line(self, errors: Errors) -> StageLine:
        """What a report says of it."""
        phases = {
            phase_name(int(phase)): float(np.nanmedian(errors.values[self.phase == phase]))
            for phase in np.unique(self.phase)
            if np.isfinite(errors.values[self.phase == phase]).any()
        }
        return StageLine(
            self.name,
            errors.median,
            self.expected,
            len(errors.finite),
            int(errors.over.sum()),
            errors.good,
            phases,
        )


def stages(site: str, material: Material, index: Ints, roundings: int) -> list[Stage]:
    """A site's rows, cut into its parts.

    Args:
        index: rows that were captured there.
        roundings: how many lie between the site and those that it is computed from.
    """
    whole = material.read(site, index).numpy()
    expected = expected_error(material.dtype, roundings)
    phase = material.rows.phase[index]
    parts = material.span(site) or {"": slice(0, whole.shape[1])}
    return [
        Stage(
            f"{site} {name}".strip(),
            site,
            index,
            part,
            whole[:, part],
            channel_scale(whole[:, part]),
            expected,
            phase,
        )
        for name, part in parts.items()
    ]


@dataclass
class Tried:
    """A hypothesis and what it leaves."""

    hypothesis: Hypothesis
    quick: float
    full: Errors | None = None


class Trier:
    """Computes hypotheses for stages."""

    def __init__(self, material: Material, seen: Mapping[int, Ints]) -> None:
        self.material = material
        self.seen = seen

    def computed(self, variant: Variant, site: str, index: Ints) -> Tensor:
        """A site's rows under a variant."""
        return Computer(self.material, variant, self.seen).compute(site, index)

    def verdict(
        self, stage: Stage, errors: Errors, hypotheses: Callable[[Ints, Ints], Iterable[Hypothesis]]
    ) -> Verdict | None:
        """What explains a stage that differs; None where nothing that was tried does.

        Args:
            errors: of the stage against the checkpoint.
            hypotheses: makes them, given the rows of the draft that differ and those that do not.
        """
        over = errors.over
        bad, fine = np.flatnonzero(over), np.flatnonzero(~over)
        if not len(bad):
            bad, fine = np.flatnonzero(errors.values > MEDIAN_ALLOWANCE * stage.expected), fine[:0]
        quick = np.concatenate((_spread(bad, _QUICK_BAD), _spread(fine, _QUICK_FINE)))
        tried = [
            Tried(one, self._quick(stage, one, quick, len(_spread(bad, _QUICK_BAD))))
            for one in hypotheses(stage.index[bad], stage.index[fine])
        ]
        for one in sorted(tried, key=lambda t: t.quick):
            if one.quick > ROW_ALLOWANCE * stage.expected:
                break
            full = stage.against(self.computed(one.hypothesis.variant, stage.site, stage.index))
            if full.good:
                one.full = full
        right = [one for one in tried if one.full is not None]
        if not right:
            return None
        right.sort(key=lambda one: (one.full.over.sum(), one.full.median) if one.full else (0, 0.0))
        return _verdict(stage, errors, right, [one for one in tried if one.full is None])

    def _quick(self, stage: Stage, one: Hypothesis, rows: Ints, n_bad: int) -> float:
        """Median error over some rows that differ; infinite where rows that did not differ now do."""
        found = stage.against(self.computed(one.variant, stage.site, stage.index[rows]), rows)
        if found.over[n_bad:].sum() > 1:
            return float("inf")
        middle = np.nanmedian(found.values[:n_bad]) if n_bad else float("nan")
        return float(middle) if np.isfinite(middle) else float("inf")


def _brief(one: Hypothesis) -> str:
    return one.title.split(", its checkpoint")[0]


def _spread(rows: Ints, count: int) -> Ints:
    if len(rows) <= count:
        return rows
    return rows[np.linspace(0, len(rows) - 1, count).astype(np.int64)]


def _verdict(stage: Stage, errors: Errors, right: Sequence[Tried], wrong: Sequence[Tried]) -> Verdict:
    best = right[0]
    assert best.full is not None
    one = best.hypothesis
    others = [other for other in right[1:] if other.hypothesis.title != one.title]
    second = min(wrong, key=lambda t: t.quick, default=None)
    over = errors.over
    before = float(np.median(errors.values[over])) if over.any() else errors.median
    proof = [
        f"{stage.name}: error {figure(before)} against the checkpoint, {figure(best.full.median)} so; "
        f"expected {figure(stage.expected)} or less"
    ]
    confidence = 1.0
    if second is not None and np.isfinite(second.quick):
        tried = len(right) + len(wrong)
        proof.append(f"next best of {tried} tried: {_brief(second.hypothesis)}: {figure(second.quick)}")
        confidence = _SURE if second.quick < _APART * best.full.expected else 1.0
    if others:
        proof.append(f"cannot be told from: {others[0].hypothesis.title}")
        confidence = _SURE
    if len(np.unique(stage.phase)) > 1:
        shares = (
            f"{phase_name(int(p))} {int(over[stage.phase == p].sum())}/{int((stage.phase == p).sum())}"
            for p in np.unique(stage.phase)
        )
        proof.append(f"rows that differ, by phase: {', '.join(shares)}")
    count = int(over.sum()) or len(errors.finite)
    return Verdict(
        one.kind,
        stage.name,
        one.title,
        one.change,
        list(one.steps),
        proof,
        best.full.median,
        before,
        None if second is None else second.quick,
        count - min(count, int(best.full.over.sum())),
        count,
        confidence,
    )
