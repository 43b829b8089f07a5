"""A term that every rank holds whole was summed over the ranks."""

from __future__ import annotations

from hsprobe.diagnose.aspects import Group, form_findings, summed_over_ranks
from hsprobe.diagnose.evidence import Evidence
from hsprobe.diagnose.explanation import Explanation
from hsprobe.diagnose.forms import Proposal
from hsprobe.diagnose.model import Finding, Mend

RANK = 22
PROPOSALS = (
    Proposal("middle", (3.0, 7.0, 15.0), "with the residual of {above}'s MLP taken {factor} times"),
    Proposal("before", (3.0, 7.0, 15.0), "with the residual of {above} taken {factor} times"),
)
EXPLANATION = Explanation(
    code="HS704",
    name="RANK_SUM",
    summary="a term that every rank holds whole was summed over the ranks, and so counts once for each",
    symptom=(
        "Acceptance is down by a part with tensor parallelism and right without, the more the more ranks; "
        "row "
        "sizes are too large while the cosine stays high."
    ),
    cause=(
        "The residual, a bias, a replicated shared expert or an output already reduced is added on every "
        "rank "
        "before an all-reduce; or a captured state is all-reduced once more."
    ),
    evidence=(
        "The ranks agree, and the served chunk is the captured state with one term taken as many times as "
        "there "
        "are ranks in the tensor parallel group. Any other factor is HS204, and a residual counted twice "
        "without "
        "two ranks HS202."
    ),
    mend="Add the term on one rank only, or after the sum; to confirm, compare with --tp-size 1.",
)


def diagnose(evidence: Evidence, explained: frozenset[int]) -> list[Finding]:
    """One finding a side."""
    size = evidence.summed_ranks

    def mend(group: Group) -> Mend:
        return Mend(
            steps=[f"The term is there {size} times, once for each of {size} ranks.", EXPLANATION.mend]
        )

    return form_findings(evidence, EXPLANATION, RANK, mend, lambda part: summed_over_ranks(evidence, part))
