"""Ranks that should hold the same do not."""

from __future__ import annotations

from hsprobe.compare.ranks import names
from hsprobe.diagnose.evidence import Evidence
from hsprobe.diagnose.explanation import Explanation
from hsprobe.diagnose.model import Finding, Mend
from hsprobe.diagnose.naming import depth_name, plural
from hsprobe.diagnose.ranks.facts import RankComparison, RankFacts, SiteDifference
from hsprobe.diagnose.ranks.wording import part_of_model, whose
from hsprobe.diagnose.wording import figure

RANK = 14
_MOST_SITES = 3
EXPLANATION = Explanation(
    code="HS701",
    name="REPLICAS",
    summary="ranks that should hold the same states do not",
    symptom=(
        "Acceptance is down, or the ranks sample different drafts and the server hangs or answers garbage. "
        "A capture of one rank alone may look right."
    ),
    cause=(
        "One rank computes something else: a weight not loaded or loaded twice, a buffer not refreshed, "
        "rows of another pass; or a sum over ranks was not taken (HS703), which the capture cannot show."
    ),
    evidence=(
        "Tensor by tensor the rows of one rank are compared with the same rows of the same passes on "
        "another. "
        "After a sum over ranks both hold the same up to the order of that sum, of which the noise model "
        "allows as much as the layers since the last equal bit for bit can make. Named are the rank, the "
        "first place in the model and the rows."
    ),
    mend=(
        "Look at the part of the model named here on the rank named here; each rank's part of the draft is "
        "fed that rank's own rows."
    ),
)


def diagnose(evidence: Evidence, explained: frozenset[int]) -> list[Finding]:
    """One finding for every set of ranks that differ alike."""
    return [finding for facts in evidence.ranks for finding in of_ranks(facts)]


def of_ranks(facts: RankFacts) -> list[Finding]:
    """From what is known of the ranks alone."""
    together: dict[tuple[int, str], list[RankComparison]] = {}
    for found in facts.differing:
        left = facts.unexplained(found)
        if left:
            together.setdefault((found.against.number, left[0].site), []).append(found)
    return [_finding(facts, alike) for alike in together.values()]


def _finding(facts: RankFacts, alike: list[RankComparison]) -> Finding:
    found = alike[0]
    left = facts.unexplained(found)
    first = left[0]
    line = first.line
    odd, right = facts.odd(alike)
    title = (
        f"{odd} {'does' if len(alike) == 1 or facts.undecided else 'do'} not hold{whose(facts)} what {right}"
    )
    if facts.undecided:
        title = f"{odd} and {right} do not hold the same{whose(facts)}"
    else:
        title += " hold" if " and " in right else " holds"
    return EXPLANATION.finding(
        f"{title}: {_where(first)}",
        rank=RANK,
        # That rows which should be equal differ is measured, not inferred.
        confidence=1.0,
        evidence=[*_proof(facts, found, left), *_vote(facts, found)],
        mend=Mend(steps=[_step(facts, found, first)]),
        chunks=[site.chunk for site in left if site.name == "aux" and site.chunk is not None],
        agree=line.over,
        rows=line.rows,
        tally="rows differ",
    )


def _where(site: SiteDifference) -> str:
    if site.place is None:
        return f"{site.site} differs"
    if site.place % 2:
        return f"the stream differs from within layer {site.place // 2} on"
    return f"the stream differs from {depth_name(site.place // 2)} on"


def _proof(facts: RankFacts, found: RankComparison, left: list[SiteDifference]) -> list[str]:
    first = left[0]
    line = first.line
    proof = []
    before = [s for s in found.sites if s.place is not None and s.line.ok and s.place < (first.place or 0)]
    part = part_of_model(first, max(before, key=lambda s: s.place or 0, default=None))
    if part:
        proof.append(f"the ranks agree before {part} and differ after it")
    if first.first:
        proof.append(f"first row: {first.first}")
    for site in left[:_MOST_SITES]:
        shown = site.line
        proof.append(
            f"{site.site}: error {figure(shown.error)}, {figure(shown.noise)} expected of the order of sums; "
            f"{shown.over:,} of {shown.rows:,} rows differ, most at {site.worst_at}, {figure(site.worst)}"
        )
    if len(left) > _MOST_SITES:
        proof.append(f"and {plural(len(left) - _MOST_SITES, 'more site')}")
    if line.nonfinite:
        proof.append(f"{plural(line.nonfinite, 'row')} of {first.site} hold NaN or Inf on one of the ranks")
    if first.requests:
        proof.append(f"the rows are those of {first.requests}")
    return proof


def _vote(facts: RankFacts, found: RankComparison) -> list[str]:
    group = next((g for g in facts.classes if any(found.member in one for one in g)), [])
    if facts.undecided:
        return ["which of them is right the ranks alone cannot tell: compare with a training dump"]
    agreeing = [one for one in group if found.against in one]
    if agreeing and len(agreeing[0]) > 1:
        return [f"{names(agreeing[0])} agree with one another"]
    return []


def _step(facts: RankFacts, found: RankComparison, first: SiteDifference) -> str:
    before = [s for s in found.sites if s.place is not None and s.line.ok and s.place < (first.place or 0)]
    part = part_of_model(first, max(before, key=lambda s: s.place or 0, default=None))
    if part and facts.undecided:
        return (
            f"Look at the sum over ranks after {part}: if it was not taken, every rank holds its own part. A "
            "reference of every depth (hsprobe capture --model) as TRAIN tells."
        )
    if part:
        return f"Look at {part} on {found.member.name}: its weights, and the sum over ranks after it."
    return (
        f"Look at what lies between the layers and {first.name} on {found.member.name}; its part of the "
        "draft "
        "is fed its own rows."
    )
