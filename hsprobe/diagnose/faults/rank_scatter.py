"""Rows of a pass that are spread over ranks: not gathered, or gathered in another order."""

from __future__ import annotations

from hsprobe.compare.ranks import names
from hsprobe.diagnose.aspects import numbers_of
from hsprobe.diagnose.evidence import Evidence
from hsprobe.diagnose.explanation import Explanation
from hsprobe.diagnose.model import Finding, Mend
from hsprobe.diagnose.naming import phase_name
from hsprobe.diagnose.ranks.facts import RankFacts, Scatter
from hsprobe.diagnose.ranks.wording import each_of, whose

RANK = 11
EXPLANATION = Explanation(
    code="HS705",
    name="TOKEN_SCATTER",
    summary="a rank holds a part of each pass's tokens only, or such parts were gathered in another order",
    symptom=(
        "The draft lacks most of the prompt, or gets rows of other tokens: acceptance is about none with "
        "several "
        "ranks, and right with one."
    ),
    cause=(
        "The tokens are spread over ranks (sequence parallel norms, DP attention, an all-to-all expert "
        "backend), "
        "and what is handed over is not gathered, gathered over another group, or gathered in blocks where "
        "the "
        "tokens alternate."
    ),
    evidence=(
        "No two ranks hold a row in common, and together they hold the pass; or every row, found by its "
        "values, "
        "stands where parts of as many ranks put it. Whether the parts are blocks or alternate is told from "
        "the "
        "rows that they hold, not from their labels."
    ),
    mend="Gather the rows over the group that they are spread over, in its order, before handing them over.",
)


def diagnose(evidence: Evidence, explained: frozenset[int]) -> list[Finding]:
    """One finding for what is handed to the draft."""
    return [finding for facts in evidence.ranks for finding in of_ranks(facts)]


def of_ranks(facts: RankFacts) -> list[Finding]:
    """From what is known of the ranks alone. Sites that are not handed to the draft may well be in parts."""
    handed = [found for found in facts.scatters if found.handed]
    first = next((found.name for found in handed), None)
    return [_finding(facts, found) for found in handed if found.name == first]


def _finding(facts: RankFacts, found: Scatter) -> Finding:
    if found.whole:
        title = (
            f"{names(found.members)}: the rows of {found.name}{whose(facts)} were gathered from parts in "
            "the wrong "
            f"order ({_HOW[found.order]})"
        )
        proof = ["found by their values, the rows of each pass stand in another order than its tokens"]
    else:
        where = f" in {numbers_of(phase_name(phase) for phase in found.phases)}" if found.phases else ""
        title = (
            f"{each_of(found.members)} holds a part of the tokens of {found.name}{whose(facts)} only{where}, "
            f"{found.order or 'in no order that is known'}"
        )
        proof = [
            f"the first holds {found.rows:,} of {found.of:,} rows; no two ranks hold a row in common",
            "each rank's part of the draft is fed that rank's own rows",
        ]
        if found.moved:
            proof.append("which tokens these are was found by their values, not by their places")
    return EXPLANATION.finding(
        title,
        rank=RANK,
        confidence=1.0,
        evidence=proof,
        mend=Mend(steps=[_step(found)]),
        agree=found.rows,
        rows=found.of,
        tally="rows of the passes",
    )


_HOW = {
    "interleaved": "the tokens alternate between ranks and were put one part after the other, or the reverse",
    "in blocks": "the blocks of the ranks are exchanged",
    "": "",
}


def _step(found: Scatter) -> str:
    if found.whole:
        return "Look at the gather of the rows: it has to undo the split, token by token."
    how = "in blocks, one after the other" if found.order != "interleaved" else "so that they alternate"
    return f"Gather {found.name} over the ranks {how} before it is handed to the draft."
