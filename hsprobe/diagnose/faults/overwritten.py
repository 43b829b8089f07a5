"""The captured buffer was written over by a kernel that came later."""

from __future__ import annotations

from hsprobe.diagnose.aspects import form_findings
from hsprobe.diagnose.evidence import Evidence
from hsprobe.diagnose.explanation import Explanation
from hsprobe.diagnose.forms import Proposal
from hsprobe.diagnose.model import Finding

RANK = 23
NORM = "layer"
PROPOSALS = (Proposal("next attention", (1.0,), "with the attention output of {below} added to it"),)
EXPLANATION = Explanation(
    code="HS203",
    name="ALIAS",
    summary="the captured buffer was written over by a later kernel",
    symptom=(
        "Acceptance is down on one kernel or backend and right on another, with the same configuration."
    ),
    cause=(
        "The capture keeps a reference to a buffer and not a copy. SGLang's fused add-and-norm writes in "
        "place: the next layer's input norm overwrites the state with its own output, or the next "
        "attention is added to it."
    ),
    evidence=(
        "The served chunk equals the state at its depth, RMS-normed with the gain of the next layer's "
        "input norm (fitted on half of the rows, tried on the other half, and recognised among the "
        "model's norms), or equals the stream after the next attention."
    ),
    mend=(
        "Copy the state when it is captured (`.clone()`), or capture before the kernel that writes in place."
    ),
)


def diagnose(evidence: Evidence, explained: frozenset[int]) -> list[Finding]:
    """One finding a side."""
    return form_findings(evidence, EXPLANATION, RANK)
