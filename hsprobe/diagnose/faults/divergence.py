"""The residual stream itself differs between the two sides from some depth on."""

from __future__ import annotations

from hsprobe.diagnose.evidence import Evidence
from hsprobe.diagnose.explanation import Explanation
from hsprobe.diagnose.model import Divergence, Finding, LayerLine, Mend
from hsprobe.diagnose.naming import depth_name
from hsprobe.diagnose.valuation import DIVERGENCE, broken, kind
from hsprobe.diagnose.wording import figure

RANK = 50
EXPLANATION = Explanation(
    code="HS504",
    name="DIVERGENCE",
    summary="the two sides' residual streams agree up to one depth and differ beyond",
    symptom="Acceptance is down by a part, in the phases concerned.",
    cause=(
        "One layer computes something else: another kernel, a wrong scale, a weight not loaded or loaded "
        "twice."
    ),
    evidence=(
        "With every depth captured on both sides, the error stays within noise up to one depth and "
        "exceeds it at the next; precision, by contrast, shows from the first layer on."
    ),
    mend="Look at the layer between the last depth that agrees and the first that does not.",
)


def diagnose(evidence: Evidence, explained: frozenset[int]) -> list[Finding]:
    """One finding at the first depth at which the same tokens give other states."""
    lines, bad = evidence.layers, broken(evidence)
    if not bad or kind(evidence) != DIVERGENCE:
        return []
    first, worst = bad[0], max(bad, key=lambda line: line.error)
    before = [line for line in lines[: lines.index(first)] if line.ok]
    after = lines[lines.index(first) :]
    agree = f"agree up to {depth_name(before[-1].depth)} and differ" if before else "differ"
    on = len(after) > 1 and not any(line.ok for line in after)
    where = f"from {depth_name(first.depth)} on" if on else f"at {depth_name(first.depth)}"
    proof = _first_row(evidence.divergence, first)
    if worst is not first:
        proof.append(f"error {figure(worst.error)} at {depth_name(worst.depth)}, the largest")
    proof += _phases(first)
    return [
        EXPLANATION.finding(
            f"the model states {agree} {where}",
            rank=RANK,
            confidence=1.0,
            evidence=proof,
            mend=Mend(steps=[_step(first)]),
            chunks=[one.chunk for one in evidence.differences],
            agree=first.over,
            rows=first.rows,
            tally="rows differ",
        )
    ]


def _first_row(found: Divergence | None, first: LayerLine) -> list[str]:
    """The earliest row that differs, at the first depth where one does."""
    if found is None or found.depth != first.depth:
        error = f"error {figure(first.error)} at {depth_name(first.depth)}"
        return [f"{error}, expected {figure(first.noise)} or less"]
    request = "an unknown request" if found.request is None else f"request {found.request}"
    return [
        f"first row: {request}, position {found.position}, token {found.token} ({found.phase}); error "
        f"{figure(found.error)} at {depth_name(found.depth)}, expected {figure(found.noise)} or less"
    ]


def _phases(line: LayerLine) -> list[str]:
    if len(line.phases) < 2:
        return []
    errors = ", ".join(f"{p.phase} {figure(p.error)}" for p in line.phases)
    return [f"by phase: {errors}"]


def _step(first: LayerLine) -> str:
    if first.depth == 0:
        return (
            "The embedding differs, so the weights or the token ids do: compare the two models' checkpoints."
        )
    if isinstance(first.depth, int):
        return f"Look at layer {first.depth - 1}, or at earlier ones that were not captured."
    return "Look at the final norm: what it is given agrees where earlier depths were compared."
