"""The last add of a layer is missing from the state."""

from __future__ import annotations

from hsprobe.diagnose.aspects import form_findings
from hsprobe.diagnose.evidence import Evidence
from hsprobe.diagnose.explanation import Explanation
from hsprobe.diagnose.forms import Proposal
from hsprobe.diagnose.model import Finding

RANK = 25
PROPOSALS = (
    Proposal("mlp", (-1.0,), "without the MLP output of {above}"),
    Proposal("attention", (-1.0,), "without the attention output of {above}"),
)
EXPLANATION = Explanation(
    code="HS205",
    name="SUBBLOCK",
    summary="the attention or MLP output of the last layer is missing from the state",
    symptom=(
        "Acceptance is a few per cent down: the cosine with the right state is 0.9 to 0.99, which passes "
        "for quantisation noise."
    ),
    cause=(
        "The state is taken between a layer's attention and its MLP, or its last add is deferred into a "
        "later kernel that has not run yet."
    ),
    evidence=(
        "The served chunk equals the stream within the layer (site mid), up to rounding, and the "
        "difference to the right state is that one output. It needs a capture of the site mid; without it "
        "this cannot be told from other faults."
    ),
    mend="Take the state after the layer's last add.",
)


def diagnose(evidence: Evidence, explained: frozenset[int]) -> list[Finding]:
    """One finding a side."""
    return form_findings(evidence, EXPLANATION, RANK)
