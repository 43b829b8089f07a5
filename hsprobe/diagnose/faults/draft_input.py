"""The draft does not receive what the target handed over."""

from __future__ import annotations

from hsprobe.compare.shards import Direct
from hsprobe.diagnose.evidence import Evidence
from hsprobe.diagnose.explanation import Explanation
from hsprobe.diagnose.judge import rows_ok
from hsprobe.diagnose.model import Finding, Mend
from hsprobe.diagnose.naming import numbers, phase_name
from hsprobe.diagnose.wording import figure

RANK = 40
EXPLANATION = Explanation(
    code="HS601",
    name="DRAFT_INPUT",
    summary="the draft receives other states than the target hands over",
    symptom="The target's states are right and acceptance is low all the same.",
    cause=(
        "Between the target's forward pass and the draft's, rows are picked, buffers reused, or a dtype cast."
    ),
    evidence="draft.input and aux of one capture, for the same tokens, differ in width or in value.",
    mend="Look at what lies between the two passes, first with --disable-overlap-schedule.",
)


def diagnose(evidence: Evidence, explained: frozenset[int]) -> list[Finding]:
    """One finding if draft.input and aux differ for the same tokens, in width or in value."""
    widths = evidence.handed_widths
    if widths is None:
        return []
    if widths[0] != widths[1]:
        title = f"the target hands over aux of width {widths[0]}, the draft receives width {widths[1]}"
        return [_finding(title, [], 1.0, 0, 0)]
    noise = evidence.handed_noise
    bad = {k: d for k, d in enumerate(evidence.handed) if not _same(d, noise)}
    if not bad:
        return []
    noun = "chunk" if len(bad) == 1 else "chunks"
    proof = []
    for k, direct in bad.items():
        errors = ", ".join(
            f"{phase_name(phase)} {figure(stats.median)}" for phase, stats in sorted(direct.by_phase.items())
        )
        proof.append(f"chunk {k}: error by phase: {errors}; expected {figure(noise)} or less")
    worst = max((direct.total for direct in bad.values()), key=lambda stats: stats.over_limit)
    title = f"draft.input differs from aux for the same tokens in {noun} {numbers(list(bad))}"
    return [_finding(title, proof, 1.0, worst.over_limit, worst.finite)]


def _same(direct: Direct, noise: float) -> bool:
    """Whether a chunk arrived as it was sent; NaN that was sent is another class's fault."""
    arrived = direct.left_nonfinite == direct.right_nonfinite
    return arrived and (not direct.total.finite or rows_ok(direct.total, noise))


def _finding(title: str, proof: list[str], confidence: float, agree: int, rows: int) -> Finding:
    steps = [
        "The ids are not the cause: the tensor changes between the target's forward pass and the draft's. "
        "Look at what lies between (row selection, buffer reuse, a dtype cast), first with overlap "
        "scheduling off (--disable-overlap-schedule)."
    ]
    return EXPLANATION.finding(
        title,
        rank=RANK,
        confidence=confidence,
        evidence=proof,
        mend=Mend(steps=steps),
        agree=agree,
        rows=rows,
        tally="rows differ",
    )
