"""The served weights are not those the training states were computed with."""

from __future__ import annotations

from hsprobe.diagnose.evidence import Evidence
from hsprobe.diagnose.explanation import Explanation
from hsprobe.diagnose.model import Finding
from hsprobe.diagnose.naming import numbers
from hsprobe.diagnose.valuation import STALE, broken, kind
from hsprobe.diagnose.wording import figure

RANK = 55
EXPLANATION = Explanation(
    code="HS503",
    name="STALE",
    summary="the states come from other weights than those trained on",
    symptom=(
        "Acceptance was right once and sinks, as the target is trained on, or after a checkpoint was "
        "exchanged."
    ),
    cause=(
        "The target's weights were updated and the draft was not trained again, or a dump of an older "
        "checkpoint was used."
    ),
    evidence=(
        "Tokens, depth, form and rows are right, and states differ from the first layer on. The served "
        "MLP, recomputed from the captured stream, is neither that of the checkpoint nor of a rounding of "
        "it; or the embedding itself differs; or the states are as far apart as those of two models."
    ),
    mend=(
        "Train the draft on states of the weights that are served, or serve the weights it was trained on."
    ),
)


def diagnose(evidence: Evidence, explained: frozenset[int]) -> list[Finding]:
    """One finding for all chunks."""
    if kind(evidence) != STALE:
        return []
    found, test = evidence.differences, evidence.weights
    proof = [
        f"chunk {one.chunk}: error {figure(one.error)} at depth {one.depth}, "
        f"expected noise {figure(one.noise)}"
        for one in found
    ]
    layers = broken(evidence)
    if layers:
        first = layers[0]
        proof.append(
            f"first at depth {first.depth}: error {figure(first.error)}, expected {figure(first.noise)}"
        )
    if test is not None:
        proof.append(
            f"the served MLP of layer {test.layer} is not that of {test.folder} (error "
            f"{figure(test.before)}), nor of a rounding of it to 8 or 4 bits"
        )
    chunks = [one.chunk for one in found]
    where = (
        f"aux {'chunks' if len(chunks) > 1 else 'chunk'} {numbers(chunks)}" if chunks else "the model states"
    )
    return [
        EXPLANATION.finding(
            f"{where} {'come' if len(chunks) != 1 else 'comes'} from other weights than those trained on",
            rank=RANK,
            confidence=1.0 if test is not None or layers else 0.8,
            evidence=proof,
            chunks=chunks,
            agree=min((one.bad for one in found), default=0),
            rows=min((one.rows for one in found), default=0),
            tally="rows differ",
        )
    ]
