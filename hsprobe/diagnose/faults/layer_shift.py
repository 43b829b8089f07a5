"""Every chunk is the same small number of layers off: an id convention misread."""

from __future__ import annotations

from hsprobe.diagnose.evidence import Evidence
from hsprobe.diagnose.explanation import Explanation
from hsprobe.diagnose.mend import ids_mend
from hsprobe.diagnose.model import Finding
from hsprobe.diagnose.naming import listed, plural
from hsprobe.diagnose.wiring import wiring
from hsprobe.diagnose.wording import (
    account_sentence,
    account_strength,
    chunk_sentence,
    declared_sentence,
    strength,
)

RANK = 20
EXPLANATION = Explanation(
    code="HS101",
    name="LAYER_SHIFT",
    summary="every chunk is the same one or two layers off",
    symptom=(
        "Acceptance is low from the first position on, or merely a few per cent down: neighbouring layers "
        "are alike, so a draft fed one layer off still half works. Nothing crashes."
    ),
    cause=(
        "Layer ids are read by another convention than they were written in. An id may name the input or "
        "the output of its layer, transformers' hidden_states[0] is the embedding, and SGLang adds one "
        "for most model classes, for some only when the first id is 1."
    ),
    evidence=(
        "Each served chunk equals, up to rounding, the server's own stream at one depth, and all these "
        "depths are the trained ones plus one constant of -2 to 2. The second best depth fits many times "
        "worse."
    ),
    mend=(
        "Write the ids that this server's rule turns into the trained depths; hsprobe prints them. Where "
        "the dump is what is off, train again or keep the ids that match it."
    ),
)


def diagnose(evidence: Evidence, explained: frozenset[int]) -> list[Finding]:
    """One finding if all chunks are off by the same one or two layers."""
    found = wiring(evidence)
    if not found.shift:
        return []
    lines = found.shifted
    way = "early" if found.shift < 0 else "late"
    many = len(lines) > 1
    title = (
        f"{'every aux chunk' if many else 'the aux chunk'} is {plural(abs(found.shift), 'layer')} too {way}"
    )
    proof = []
    if evidence.trained_chunks == evidence.served_chunks:
        served = [evidence.claimed_depths[line.index] if found.by_account else line.served for line in lines]
        title += f": served depths {listed(served)}, trained on {listed(line.trained for line in lines)}"
        proof = [chunk_sentence(line) for line in lines]
    if found.by_account:
        title += ", by the server's account"
        proof = account_sentence(evidence, lines)
    confidence, agree, rows = account_strength(lines) if found.by_account else strength(lines)
    return [
        EXPLANATION.finding(
            title,
            rank=RANK,
            confidence=confidence,
            evidence=[*proof, *declared_sentence(lines)],
            mend=ids_mend(evidence),
            chunks=[line.index for line in lines],
            agree=agree,
            rows=rows,
            tally="rows differ" if found.by_account else "rows agree",
        )
    ]
