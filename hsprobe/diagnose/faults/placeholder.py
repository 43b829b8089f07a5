"""Only the rows of placeholder tokens differ."""

from __future__ import annotations

from hsprobe.diagnose.evidence import Evidence
from hsprobe.diagnose.explanation import Explanation
from hsprobe.diagnose.model import Finding
from hsprobe.diagnose.naming import numbers, plural
from hsprobe.diagnose.valuation import PLACEHOLDER, kind
from hsprobe.diagnose.wording import figure

RANK = 45
EXPLANATION = Explanation(
    code="HS403",
    name="MM",
    summary="only the rows of placeholder tokens differ, as those of an image",
    symptom="Acceptance is right for text and low for requests with images.",
    cause=(
        "Features of images are added or inserted on one side only, or at another place: SGLang captures "
        "a layer's input before it adds deepstack features, transformers after; or the placeholder's own "
        "embedding is used."
    ),
    evidence=(
        "In every request the first row to differ is that of a repeated token id, all rows of that id "
        "differ, and rows before them, like requests without that id, are equal up to noise."
    ),
    mend="Capture and serve the states at the same side of the place where the features are added.",
)


def diagnose(evidence: Evidence, explained: frozenset[int]) -> list[Finding]:
    """One finding for all chunks."""
    if kind(evidence) != PLACEHOLDER:
        return []
    found = evidence.differences
    head = max(found, key=lambda one: one.bad)
    chunks = [one.chunk for one in found]
    noun = "chunk" if len(chunks) == 1 else "chunks"
    return [
        EXPLANATION.finding(
            f"in aux {noun} {numbers(chunks)} only the rows of token id {head.placeholder} differ, "
            f"in {plural(head.spans, 'span')}",
            rank=RANK,
            confidence=1.0,
            evidence=[
                f"chunk {one.chunk}: {one.bad:,} of {one.rows:,} rows differ; the middle row by "
                f"{figure(one.error)}, expected noise {figure(one.noise)}"
                for one in found
            ],
            chunks=chunks,
            agree=head.bad,
            rows=head.rows,
            tally="rows differ",
        )
    ]
