"""Every chunk is the same small number of layers off: an id convention misread."""

from __future__ import annotations

from hsprobe.diagnose.evidence import Evidence
from hsprobe.diagnose.mend import ids_mend
from hsprobe.diagnose.model import Finding, State
from hsprobe.diagnose.naming import listed, plural
from hsprobe.diagnose.wording import chunk_sentence, strength

CODE = "LAYER_SHIFT"
RANK = 20
# Conventions differ by one, a correction applied twice by two; more is another set of layers.
_LARGEST = 2


def diagnose(evidence: Evidence, explained: frozenset[int]) -> list[Finding]:
    """One finding if all chunks are off by the same one or two layers."""
    lines = evidence.lines
    if explained or not lines or any(line.state is not State.WRONG for line in lines):
        return []
    offsets = {
        line.served - line.trained
        for line in lines
        if isinstance(line.served, int) and isinstance(line.trained, int)
    }
    known = all(isinstance(line.served, int) and isinstance(line.trained, int) for line in lines)
    if not known or len(offsets) != 1:
        return []
    offset = offsets.pop()
    if abs(offset) > _LARGEST:
        return []
    way = "early" if offset < 0 else "late"
    title = (
        f"every aux chunk is {plural(abs(offset), 'layer')} too {way}: served depths "
        f"{listed(line.served for line in lines)}, trained on {listed(line.trained for line in lines)}"
    )
    confidence, agree, rows = strength(lines)
    return [
        Finding(
            code=CODE,
            title=title,
            rank=RANK,
            confidence=confidence,
            evidence=[chunk_sentence(line) for line in lines],
            mend=ids_mend(evidence),
            chunks=[line.index for line in lines],
            agree=agree,
            rows=rows,
        )
    ]
