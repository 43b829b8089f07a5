"""The prompts are not the same token ids on both sides."""

from __future__ import annotations

from collections import Counter

from hsprobe.diagnose.evidence import Evidence
from hsprobe.diagnose.explanation import Explanation
from hsprobe.diagnose.model import Finding
from hsprobe.diagnose.naming import plural
from hsprobe.diagnose.tokens import Parting, Tokens

RANK = 42
_EXAMPLES = 2
EXPLANATION = Explanation(
    code="HS401",
    name="TEMPLATE",
    summary="the prompts are other token ids in training than in service",
    symptom=(
        "Acceptance is lower in service than in training's own evaluation; states are right for equal ids."
    ),
    cause=(
        "Another chat template or tokenizer, a first token added twice or not at all, think blocks "
        "inserted or stripped between generation and training."
    ),
    evidence=(
        "Prompts of both sides are matched by what they share; from one position on their ids differ, in "
        "a large share of the requests, often to agree again a constant number of positions on. Generated "
        "tokens are not looked at."
    ),
    mend="Tokenise both sides with the same template: compare the ids around the position given.",
)


def diagnose(evidence: Evidence, explained: frozenset[int]) -> list[Finding]:
    """One finding for all requests."""
    tokens = evidence.tokens
    if tokens is None or not tokens.many or tokens.shifted:
        return []
    total = len(tokens.parted) + tokens.agreed
    position, count = Counter(parting.position for parting in tokens.parted).most_common(1)[0]
    where = f" from position {position} on" if count > len(tokens.parted) / 2 else ""
    return [
        EXPLANATION.finding(
            f"the token ids of {len(tokens.parted):,} of {plural(total, 'prompt')} differ{where}",
            rank=RANK,
            confidence=1.0,
            evidence=[_sentence(tokens, parting) for parting in tokens.parted[:_EXAMPLES]],
            agree=len(tokens.parted),
            rows=total,
            tally="prompts differ",
        )
    ]


def _sentence(tokens: Tokens, parting: Parting) -> str:
    again = {0: "the ids agree again after it", 1: "INFER has one id more", -1: "TRAIN has one id more"}
    how = again.get(parting.shift, f"the ids agree again {plural(abs(parting.shift), 'position')} off")
    return (
        f"request {tokens.names[0][parting.train]} from {parting.start}: {parting.train_ids} in TRAIN, "
        f"{parting.infer_ids} in INFER; {how}"
    )
