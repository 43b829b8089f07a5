"""Findings of a comparison in which the capture has several ranks: of the rank that speaks for all, and of "
"others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hsprobe.compare.ranks import Member, names
from hsprobe.diagnose.draft.model import DraftFindings
from hsprobe.diagnose.evidence import Evidence
from hsprobe.diagnose.model import Finding
from hsprobe.diagnose.ranks.facts import RankFacts
from hsprobe.diagnose.ranks.survey import Survey
from hsprobe.diagnose.registry import findings
from hsprobe.diagnose.sides import Side
from hsprobe.errors import HsprobeError

Gather = Callable[[Side], Evidence]
# Classes that describe values: of one rank among several, HS701 says the same and where it begins.
_OF_VALUES = ("HS501", "HS503", "HS504", "HS599")
# Classes that name their ranks themselves, or are not about states of one rank.
_OF_ALL = ("HS7", "HS8")


def judged(
    survey: Survey,
    side: Side,
    facts: RankFacts,
    others: Sequence[RankFacts],
    gather: Gather,
    draft: DraftFindings | None = None,
) -> tuple[Evidence, list[Finding]]:
    """(evidence of the rank that speaks for all, the findings of all).

    Args:
        side: of the rank that speaks so far. others: what is known of the ranks of other sides.
        gather: makes the comparisons of one side.
        draft: the served draft against its checkpoint, where one was given.
    """
    apart: list[_Apart] = []
    if not facts.partials:
        for group in facts.classes:
            if len(group) > 1:
                apart += _group(survey, group, facts, gather)
    speaking = next((one for one in apart if survey.speaks(one.members[0])), None)
    if speaking is not None and speaking.evidence is not None and len(facts.classes) == 1:
        evidence = speaking.evidence
    else:
        evidence = gather(survey.side() if apart else side)
    evidence.ranks, evidence.draft = [facts, *others], draft
    found = findings(evidence)
    if not apart:
        return evidence, found
    mine = names(speaking.members) if speaking else ""
    everywhere = [{_key(finding) for finding in one.findings} for one in apart]
    kept = []
    for finding in found:
        shared = finding.code[:3] in _OF_ALL or all(_key(finding) in one for one in everywhere)
        if shared:
            kept.append(finding)
        elif not _of_values(finding):
            kept.append(replace(finding, title=f"{mine}: {finding.title}"))
    seen = {_key(finding) for finding in found}
    for one in apart:
        kept += [
            replace(finding, title=f"{names(one.members)}: {finding.title}")
            for finding in one.findings
            if _key(finding) not in seen and not _of_values(finding) and one is not speaking
        ]
    return evidence, sorted(kept, key=lambda finding: (finding.rank, -finding.confidence))


@dataclass
class _Apart:
    """Ranks that are equal to one another but not to the others of their group, each class judged by "
    "itself."""

    members: list[Member]
    evidence: Evidence | None
    findings: list[Finding]


def _group(survey: Survey, group: list[list[Member]], facts: RankFacts, gather: Gather) -> list[_Apart]:
    """The findings of each class of equal ranks; the best of them is made to speak."""
    found = [_of_rank(survey, members, gather) for members in group]
    best = min(found, key=lambda one: (bool(one.findings), -len(one.members), one.members[0].number))
    survey.speak(best.members[0])
    right = [one for one in found if not one.findings]
    ties = [one for one in found if len(one.members) == len(best.members)]
    facts.undecided |= len(right) != 1 and len(ties) > 1
    shared = set.intersection(*({_key(finding) for finding in one.findings} for one in found))
    for one in found:
        numbers = {member.number for member in one.members}
        if right and one.findings:
            facts.wrong |= numbers
        if any(_key(finding) not in shared and not _of_values(finding) for finding in one.findings):
            facts.named |= numbers
    return found


def _of_rank(survey: Survey, members: list[Member], gather: Gather) -> _Apart:
    try:
        evidence = gather(survey.side_of(members[0]))
    except HsprobeError:
        # This rank alone holds nothing to compare.
        return _Apart(members, None, [])
    return _Apart(members, evidence, findings(evidence))


def _key(finding: Finding) -> tuple[str, str]:
    return finding.code, finding.title


def _of_values(finding: Finding) -> bool:
    return finding.code in _OF_VALUES
