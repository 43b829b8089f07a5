"""The residual is missing from the state, or in it twice."""

from __future__ import annotations

from hsprobe.diagnose.aspects import form_findings
from hsprobe.diagnose.evidence import Evidence
from hsprobe.diagnose.explanation import Explanation
from hsprobe.diagnose.forms import Proposal
from hsprobe.diagnose.model import Finding

RANK = 24
PROPOSALS = (
    Proposal("middle", (-1.0,), "without its residual (the output of {above}'s MLP alone)"),
    Proposal("before", (-1.0,), "without its residual (what {above} adds alone)"),
    Proposal("attention", (1.0,), "without its residual (the output of {above}'s attention alone)", base=0.0),
    Proposal("middle", (1.0,), "with the residual of {above}'s MLP counted twice"),
    Proposal("before", (1.0,), "with the residual of {above} counted twice"),
    Proposal("state", (1.0,), "counted twice (the whole state doubled)"),
)
EXPLANATION = Explanation(
    code="HS202",
    name="RESID",
    summary="the residual is missing from the state, or counted twice",
    symptom=(
        "Without the residual acceptance is about none; with it twice row sizes double while the cosine "
        "stays high, and acceptance sinks by a part."
    ),
    cause=(
        "SGLang's layers hand on (hidden_states, residual) and the state is their sum; a capture that "
        "takes hidden_states alone holds the last MLP's output, one that adds a residual already added "
        "counts it twice."
    ),
    evidence=(
        "The served chunk equals, up to rounding, the difference (or the sum with the residual) of "
        "captured states around one depth; the same form fits no other depth."
    ),
    mend="Hand over hidden_states + residual, once, at the place where the chunk is taken.",
)


def diagnose(evidence: Evidence, explained: frozenset[int]) -> list[Finding]:
    """One finding a side."""
    return form_findings(evidence, EXPLANATION, RANK)
