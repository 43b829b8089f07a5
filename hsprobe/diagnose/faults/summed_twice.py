"""A term, or the whole state, is there several times, or scaled."""

from __future__ import annotations

from hsprobe.diagnose.aspects import form_findings
from hsprobe.diagnose.evidence import Evidence
from hsprobe.diagnose.explanation import Explanation
from hsprobe.diagnose.forms import Proposal
from hsprobe.diagnose.model import Finding

RANK = 26
PROPOSALS = (
    Proposal("mlp", (), "with the MLP output of {above} taken {factor} times"),
    Proposal("attention", (), "with the attention output of {above} taken {factor} times"),
    Proposal("block", (), "with all that {above} adds taken {factor} times"),
    Proposal("state", (), "taken {factor} times"),
)
EXPLANATION = Explanation(
    code="HS204",
    name="SCALE_DUP",
    summary="a term of the state, or all of it, is taken several times or scaled",
    symptom=(
        "Acceptance is down by a part; row sizes differ while the cosine stays high. It comes and goes "
        "with the number of ranks."
    ),
    cause=(
        "A term that every rank holds whole (a replicated expert, an already reduced output) is summed "
        "over the ranks once more; or a scale, as of an embedding, is applied on one side only."
    ),
    evidence=(
        "The served chunk is the captured state plus one factor times one captured term; the factor is "
        "fitted, is the same in all rows, and leaves only rounding. Whole factors of 2, 4 or 8 point at a "
        "number of ranks."
    ),
    mend="Reduce the term once, or hold it on one rank only; apply the scale on both sides or on neither.",
)


def diagnose(evidence: Evidence, explained: frozenset[int]) -> list[Finding]:
    """One finding a side."""
    return form_findings(evidence, EXPLANATION, RANK)
