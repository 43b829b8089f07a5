"""One row a request was kept where the draft needs all of them."""

from __future__ import annotations

from hsprobe.compare.absence import LAST_ONLY
from hsprobe.diagnose.evidence import Evidence
from hsprobe.diagnose.explanation import Explanation
from hsprobe.diagnose.model import Finding

RANK = 19
# A few rows may be missing for other reasons; a capture mode takes nearly all of every prompt.
_SHARE = 0.1
EXPLANATION = Explanation(
    code="HS305",
    name="LAST_ONLY",
    summary="only the last row of each pass is kept where the draft needs all rows",
    symptom="The draft's cache lacks the prompt: acceptance is low, the lower the longer the prompts.",
    cause=(
        "The capture mode is LAST where FULL is needed: a CUDA graph recorded in the wrong mode, or a "
        "server started without a draft and with the default mode."
    ),
    evidence=(
        "The passes are labelled LAST, the layers computed all rows of them, and the chunks hold the last "
        "row of each request alone."
    ),
    mend="Serve with the draft, or in capture mode FULL (CaptureHiddenMode.FULL).",
)


def diagnose(evidence: Evidence, explained: frozenset[int]) -> list[Finding]:
    """One finding for all chunks."""
    coverage = evidence.coverage
    lost = coverage.reasons.get(LAST_ONLY, 0)
    if evidence.served is None or lost < _SHARE * coverage.train_rows:
        return []
    return [
        EXPLANATION.finding(
            f"{evidence.served.name} holds the last row of each pass alone: {lost:,} of "
            f"{coverage.train_rows:,} training rows were computed and not kept",
            rank=RANK,
            confidence=1.0,
            evidence=["the passes were run in capture mode LAST"],
            agree=lost,
            rows=coverage.train_rows,
            tally="rows not kept",
        )
    ]
