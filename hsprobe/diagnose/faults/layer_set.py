"""One or several chunks carry another depth than the draft was trained on, the embedding for instance."""

from __future__ import annotations

from hsprobe.diagnose.evidence import Evidence
from hsprobe.diagnose.explanation import Explanation
from hsprobe.diagnose.mend import ids_mend
from hsprobe.diagnose.model import ChunkLine, Finding, State
from hsprobe.diagnose.naming import listed, numbers
from hsprobe.diagnose.wiring import wiring
from hsprobe.diagnose.wording import (
    account_sentence,
    account_strength,
    chunk_sentence,
    declared_sentence,
    strength,
)

RANK = 30
EXPLANATION = Explanation(
    code="HS102",
    name="LAYER_SET",
    summary="one or several chunks carry other depths than the draft was trained on",
    symptom="Acceptance is low, down to none where the depths lie far apart.",
    cause=(
        "The draft's configuration names other layers than the training run captured, or none at all, in "
        "which case SGLang takes layers 2, L/2 and L-3; or one id was changed on one side only. An id of "
        "-1 gives the embedding."
    ),
    evidence=(
        "Each chunk is identified on its own, against every depth of the server's stream. The chunks of a "
        "wrong depth are not a constant off, and the trained depths in another order do not give them."
    ),
    mend="Set eagle_aux_hidden_state_layer_ids to the ids that hsprobe prints.",
)


def diagnose(evidence: Evidence, explained: frozenset[int]) -> list[Finding]:
    """One finding for all chunks of a wrong depth that no order or shift accounts for."""
    found = wiring(evidence)
    wrong = found.wrong
    if not wrong or evidence.trained_chunks != evidence.served_chunks:
        return []
    head = min(wrong, key=_embedding_first)
    right = [line.index for line in evidence.lines if line.state is State.OK]
    if found.by_account:
        title, proof = _by_account(evidence, wrong), account_sentence(evidence, wrong)
        confidence, agree, rows = account_strength(wrong)
    else:
        title = chunk_sentence(head)
        proof = [chunk_sentence(line) for line in wrong if line is not head]
        confidence, agree, rows = strength(wrong)
        if right:
            noun = "chunk" if len(right) == 1 else "chunks"
            proof.append(f"{noun} {numbers(right)} as trained")
    return [
        EXPLANATION.finding(
            title,
            rank=RANK,
            confidence=confidence,
            evidence=[*proof, *declared_sentence(wrong)],
            mend=ids_mend(evidence),
            chunks=[line.index for line in wrong],
            agree=agree,
            rows=rows,
            tally="rows differ" if found.by_account else "rows agree",
        )
    ]


def _by_account(evidence: Evidence, wrong: list[ChunkLine]) -> str:
    one = len(wrong) == 1
    noun, verb, depth = ("chunk", "is", "depth") if one else ("chunks", "are", "depths")
    said = listed(evidence.claimed_depths[line.index] for line in wrong)
    chunks = numbers([line.index for line in wrong])
    return (
        f"aux {noun} {chunks} {verb} not what the draft was trained on; by the server's account"
        f" {depth} {said}, trained on {listed(line.trained for line in wrong)}"
    )


def _embedding_first(line: ChunkLine) -> tuple[bool, int]:
    return line.served != 0, line.index
