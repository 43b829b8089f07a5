"""The right states in a coarser precision."""

from __future__ import annotations

from hsprobe.diagnose.evidence import Evidence
from hsprobe.diagnose.explanation import Explanation
from hsprobe.diagnose.model import Finding
from hsprobe.diagnose.naming import listed, numbers
from hsprobe.diagnose.valuation import PRECISION, coarse, kind
from hsprobe.diagnose.weights import Match
from hsprobe.diagnose.wording import figure

RANK = 60
# Without the weights, further training of them by as little looks the same.
_UNSURE = 0.7
EXPLANATION = Explanation(
    code="HS501",
    name="PRECISION",
    summary="the states are the right ones, in a coarser precision",
    symptom="Acceptance is down by a few to some tens of per cent, evenly.",
    cause=(
        "The target is served with quantised weights, a coarser KV cache or other kernels, and the draft "
        "was trained on the states of the exact model; or the dump was stored coarsely."
    ),
    evidence=(
        "Depth, form and rows are right, by a wide margin over the next best; the rest is in all rows "
        "alike, has no direction, constant or scale in common, and grows smoothly with depth from the "
        "first layer on. Values of few significant bits, a quantisation that the server names, or an MLP "
        "that computes with rounded weights, prove it."
    ),
    mend=(
        "Train the draft on the states of the model as it is served, or serve the precision it was "
        "trained on. If the acceptance is good enough, measure this noise with `hsprobe noise` and allow "
        "for it."
    ),
)


def diagnose(evidence: Evidence, explained: frozenset[int]) -> list[Finding]:
    """One finding for all chunks."""
    if kind(evidence) != PRECISION:
        return []
    found = evidence.differences
    proof = [
        f"chunk {one.chunk}: error {figure(one.error)} at depth {one.depth}, expected noise "
        f"{figure(one.noise)}; the first four directions hold {one.shape.low_rank:.0%} of it, "
        f"a constant {one.shape.constant:.0%}"
        for one in found
    ]
    proof += _margins(evidence)
    sure, words = _how(evidence)
    chunks = [one.chunk for one in found]
    noun = "chunks" if len(chunks) > 1 else "chunk"
    where = f"aux {noun} {numbers(chunks)}" if chunks else "the model states"
    depths = listed(one.depth for one in found)
    what = (
        f"{'are depths' if len(chunks) > 1 else 'is depth'} {depths} as trained"
        if chunks
        else "are the right ones"
    )
    return [
        EXPLANATION.finding(
            f"{where} {what}, in a coarser precision",
            rank=RANK,
            confidence=1.0 if sure else _UNSURE,
            evidence=[*proof, words],
            chunks=chunks,
            agree=min((one.bad for one in found), default=0),
            rows=min((one.rows for one in found), default=0),
            tally="rows differ",
        )
    ]


def _margins(evidence: Evidence) -> list[str]:
    margins = [
        chunk.line.margin for chunk in evidence.chunks if chunk.leftover is not None and chunk.line.margin
    ]
    return [f"the next best depth fits {min(margins):.2g} times worse or more"] if margins else []


def _how(evidence: Evidence) -> tuple[bool, str]:
    rounded = coarse(evidence)
    if rounded:
        side, one = rounded[0]
        bits = min(one.shape.bits)
        which = "the served values" if side == "served" else "the values of the training dump"
        return True, f"{which} have {bits} mantissa bits, those of the other side {max(one.shape.bits)}"
    if evidence.serving.quantized:
        return True, f"the server names the quantisation {evidence.serving.quantized}"
    test = evidence.weights
    if test is not None and test.match is Match.ROUNDED:
        return True, (
            f"the served MLP of layer {test.layer} computes with the weights of {test.folder} rounded to "
            f"{test.scheme}: error {figure(test.error)}, with the weights as they are {figure(test.before)}"
        )
    if test is not None:
        return True, f"the served MLP of layer {test.layer} computes with the weights of {test.folder}"
    return False, (
        "weights changed by as little would look the same (HS503): a model folder that can be read, and a "
        "capture with '--sites aux,layer,mid', would tell"
    )
