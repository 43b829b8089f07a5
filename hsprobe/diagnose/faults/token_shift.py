"""The token ids of a dump are shifted against its states."""

from __future__ import annotations

from hsprobe.diagnose.evidence import Evidence
from hsprobe.diagnose.explanation import Explanation
from hsprobe.diagnose.model import Finding
from hsprobe.diagnose.naming import plural

RANK = 41
EXPLANATION = Explanation(
    code="HS402",
    name="TOKEN_SHIFT",
    summary="the token ids of the training dump are shifted against its states",
    symptom="Training loss looks normal and acceptance is near one token.",
    cause=(
        "A draft's input ids are the target's moved by one; ids, states and loss mask were not moved "
        "alike. A left shift made twice, or copied to a method that predicts the same position, does it."
    ),
    evidence=(
        "The dump's ids agree with the served ids at a shift of one or two positions, and its states "
        "agree with the served states without it."
    ),
    mend="Store ids and states of the same position in the same row, and shift once, in the trainer.",
)


def diagnose(evidence: Evidence, explained: frozenset[int]) -> list[Finding]:
    """One finding for the whole dump."""
    tokens = evidence.tokens
    if tokens is None or not tokens.shifted:
        return []
    way = "ahead of" if tokens.shifted > 0 else "behind"
    parting = tokens.parted[0]
    return [
        EXPLANATION.finding(
            f"the training dump's token ids are {plural(abs(tokens.shifted), 'position')} {way} its states",
            rank=RANK,
            confidence=1.0,
            evidence=[
                f"request {tokens.names[0][parting.train]} begins {parting.train_ids} in TRAIN, "
                f"{parting.infer_ids} in INFER",
                "row by row, without the shift, the states of the prompts are equal up to noise",
            ],
            agree=len(tokens.parted),
            rows=len(tokens.parted) + tokens.agreed,
            tally="requests shifted",
        )
    ]
