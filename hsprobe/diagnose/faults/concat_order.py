"""The right chunks in another order than the draft was trained with."""

from __future__ import annotations

from hsprobe.diagnose.evidence import Evidence
from hsprobe.diagnose.explanation import Explanation
from hsprobe.diagnose.mend import permutation_steps
from hsprobe.diagnose.model import Finding, Mend
from hsprobe.diagnose.naming import listed, numbers
from hsprobe.diagnose.wiring import wiring
from hsprobe.diagnose.wording import declared_sentence, strength

RANK = 15
EXPLANATION = Explanation(
    code="HS104",
    name="CONCAT",
    summary="the chunks come in another order than the draft was trained with",
    symptom="Acceptance is about none: every column block of the draft's fc meets another layer's states.",
    cause=(
        "SGLang hands chunks over in ascending layer order, whatever the order of the ids; a trainer that "
        "concatenates in the order of its configuration, or a dump with two chunks exchanged, disagrees."
    ),
    evidence=(
        "Each served chunk equals one of the trained depths, and together they are a permutation of them "
        "(after a shift, where there is one too)."
    ),
    mend=(
        "Write the dump's chunks in the served order and train again, or permute the column blocks of the "
        "draft's fc.weight; no ids change the order."
    ),
)


def diagnose(evidence: Evidence, explained: frozenset[int]) -> list[Finding]:
    """One finding if the served chunks are the training chunks, permuted."""
    found = wiring(evidence)
    order = found.order
    if order is None:
        return []
    moved = found.moved
    trained = [line.trained for line in evidence.lines]
    served = [trained[j] for j in order]
    known = all(depth is not None for depth in trained)
    as_served = sorted((d for d in served if isinstance(d, int)), key=int)
    how = (
        f"trained on depths {listed(trained)}, served {listed(served)}"
        if known
        else f"served chunk {', '.join(f'{k} is training chunk {j}' for k, j in enumerate(order) if k != j)}"
    )
    if found.shift or found.wrong:
        how = f"trained in the order of depths {listed(trained)}, served ascending"
    confidence, agree, rows = strength(moved)
    depths = as_served if known and served == as_served else None
    return [
        EXPLANATION.finding(
            f"aux chunks {numbers([line.index for line in moved])} come in another order: {how}",
            rank=RANK,
            confidence=confidence,
            evidence=declared_sentence(evidence.lines),
            mend=Mend(
                f"order of the training chunks: {list(range(len(order)))}  ->  {order}",
                permutation_steps(order, depths, sglang=evidence.serving.producer == "sglang"),
            ),
            chunks=[line.index for line in moved],
            agree=agree,
            rows=rows,
        )
    ]
