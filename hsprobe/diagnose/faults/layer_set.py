"""One or several chunks carry another depth than the draft was trained on, the embedding for instance."""

from __future__ import annotations

from hsprobe.diagnose.evidence import Evidence
from hsprobe.diagnose.mend import ids_mend
from hsprobe.diagnose.model import ChunkLine, Finding, State
from hsprobe.diagnose.naming import numbers
from hsprobe.diagnose.wording import chunk_sentence, strength

CODE = "LAYER_SET"
RANK = 30


def diagnose(evidence: Evidence, explained: frozenset[int]) -> list[Finding]:
    """One finding for all chunks of a wrong depth that no other class accounts for."""
    wrong = [line for line in evidence.lines if line.state is State.WRONG and line.index not in explained]
    if not wrong:
        return []
    head = min(wrong, key=_embedding_first)
    others = [line for line in wrong if line is not head]
    right = [line.index for line in evidence.lines if line.state is State.OK]
    proof = [chunk_sentence(line) for line in others]
    if right:
        proof.append(
            f"chunk {numbers(right)} as trained" if len(right) == 1 else f"chunks {numbers(right)} as trained"
        )
    confidence, agree, rows = strength(wrong)
    return [
        Finding(
            code=CODE,
            title=chunk_sentence(head),
            rank=RANK,
            confidence=confidence,
            evidence=proof,
            mend=ids_mend(evidence),
            chunks=[line.index for line in wrong],
            agree=agree,
            rows=rows,
        )
    ]


def _embedding_first(line: ChunkLine) -> tuple[bool, int]:
    return line.served != 0, line.index
