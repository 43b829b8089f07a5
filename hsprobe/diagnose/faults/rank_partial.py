"""A sum over ranks was not taken: every rank holds its own part."""

from __future__ import annotations

from hsprobe.diagnose.aspects import numbers_of
from hsprobe.diagnose.evidence import Evidence
from hsprobe.diagnose.explanation import Explanation
from hsprobe.diagnose.model import Finding, Mend
from hsprobe.diagnose.naming import depth_name, listed, numbers, phase_name
from hsprobe.diagnose.ranks.facts import PartialSum, RankFacts
from hsprobe.diagnose.ranks.wording import chunks_of, each_of
from hsprobe.diagnose.wording import figure

RANK = 13
# Without the stream within layers it is known that a sum is missing, by elimination, but not which.
_UNTOLD = 0.9
EXPLANATION = Explanation(
    code="HS703",
    name="TP_PARTIAL",
    summary="partial sums of the ranks were never reduced: the sum over ranks is right, no single rank is",
    symptom=(
        "Acceptance is a few per cent to a half down with tensor parallelism and right without; the cosine "
        "with the right state is 0.97 to 0.998, which passes for quantisation noise. Long prefills may be "
        "right where decode and verify are not."
    ),
    cause=(
        "With all-reduce fusion a layer leaves its last sum over ranks to the norm of the next layer; a "
        "capture "
        "taken in between holds the residual plus this rank's own part. Or an all-reduce is missing in the "
        "model itself, from where on every rank computes on a stream of its own; or the sum runs over only "
        "one "
        "of two groups (experts, tensor parallel)."
    ),
    evidence=(
        "The ranks differ, and no single rank is a state in any form. Their sum is one: with g parts the "
        "mean "
        "over ranks equals, up to rounding, state - (1 - 1/g) * term. The term that fits, the attention, "
        "the MLP "
        "or both, is the one that was not summed; telling them apart needs the site mid."
    ),
    mend=(
        "Reduce before the state is taken. To confirm, serve with "
        "--enforce-disable-flashinfer-allreduce-fusion, "
        "or with --tp-size 1, and compare again."
    ),
)
_TERM = {
    "mlp": "the MLP output of layer {layer}",
    "attention": "the attention output of layer {layer}",
    "block": "the attention and the MLP output of layer {layer}",
    "state": "the whole state",
    "": "an output of layer {layer}",
}
_TERMS = {
    "mlp": "the MLP outputs of layers {layers}",
    "attention": "the attention outputs of layers {layers}",
    "block": "the attention and MLP outputs of layers {layers}",
    "state": "the whole state",
    "": "an output of each of layers {layers}",
}


def diagnose(evidence: Evidence, explained: frozenset[int]) -> list[Finding]:
    """One finding for all chunks in which the same sum is missing."""
    return [finding for facts in evidence.ranks for finding in of_ranks(facts)]


def of_ranks(facts: RankFacts) -> list[Finding]:
    """From what is known of the ranks alone."""
    return [_finding(facts, found) for found in facts.partials]


def _finding(facts: RankFacts, found: PartialSum) -> Finding:
    term = _term(found)
    if found.stream:
        title = f"{term} was never summed over ranks: from there on every rank has a stream of its own"
    else:
        verb = "is" if len(found.chunks) == 1 else "are"
        title = (
            f"{chunks_of(facts.side, found.chunks)} {verb} a sum over ranks that was never taken: "
            f"{each_of(found.members)} holds its own part of {term}"
        )
        if found.phases:
            title += f" in {numbers_of(phase_name(phase) for phase in found.phases)}"
    fit = found.fit
    return EXPLANATION.finding(
        title,
        rank=RANK,
        confidence=fit.share if fit is not None else _UNTOLD,
        evidence=_proof(facts, found),
        mend=Mend(steps=_steps(found)),
        chunks=found.chunks,
        agree=round(fit.share * fit.rows) if fit is not None else 0,
        rows=fit.rows if fit is not None else 0,
    )


def _term(found: PartialSum) -> str:
    layers = [depth - 1 for depth in found.depths]
    if len(layers) == 1:
        return _TERM[found.term].format(layer=layers[0])
    return _TERMS[found.term].format(layers=numbers(layers))


def _proof(facts: RankFacts, found: PartialSum) -> list[str]:
    what = depth_name(found.depths[0]) if len(found.depths) == 1 else f"depths {listed(found.depths)}"
    whose = "captured" if found.source == facts.side else "trained on"
    proof = []
    if found.fit is not None:
        proof.append(
            f"the sum over {found.over} ranks is {what} as {whose}: error {figure(found.fit.error)}, "
            "rounding "
            f"{figure(found.fit.expected)}; the best single rank: {figure(found.alone)}"
        )
    else:
        proof.append(
            f"no single rank is a state (best error {figure(found.alone)}), and the mean over ranks lies "
            "between "
            f"depth {found.depths[0] - 1} and {found.depths[0]} in every row"
        )
        proof.append(
            "whether the attention or the MLP is not summed, a capture with '--sites aux,layer,mid' tells"
        )
    if found.over < len(found.members):
        proof.append(
            f"{len(found.members)} ranks hold {found.over} different parts: one of two groups was summed"
        )
    if not found.stream:
        proof.append("each rank's part of the draft is fed that rank's own rows")
    return proof


def _steps(found: PartialSum) -> list[str]:
    layer = found.depths[0] - 1
    what = {"mlp": "MLP", "attention": "attention"}.get(found.term, "layer")
    at = f"the {what} of layer {layer}" if what != "layer" else f"layer {layer}"
    if found.stream:
        return [
            f"Look for the missing all-reduce after {at} (RowParallelLinear with reduce_results=False, or a "
            "fused "
            "all-reduce that did not run)."
        ]
    norm = "the norm before the MLP" if found.term == "attention" else "the next layer's norm"
    return [
        f"Look at the capture after {at}: it takes hidden_states + residual before the all-reduce that "
        f"all-reduce fusion leaves to {norm}. Reduce first, or take the residual after that norm.",
        "To confirm, serve with --enforce-disable-flashinfer-allreduce-fusion (SGLang 0.5.15 on), or with "
        "--tp-size 1, and compare again.",
    ]
