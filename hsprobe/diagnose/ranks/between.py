"""The ranks of one capture among themselves, without a training dump."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hsprobe.compare.align import pair
from hsprobe.compare.direct import Lane, compare
from hsprobe.compare.noise import Level
from hsprobe.compare.ranks import Member
from hsprobe.diagnose.consistency import RANKS, Comparison, SelfReport, SiteLine
from hsprobe.diagnose.judge import rows_ok
from hsprobe.diagnose.model import Finding
from hsprobe.diagnose.ranks.facts import RankComparison, RankFacts
from hsprobe.diagnose.ranks.replicas import CHUNKED
from hsprobe.diagnose.ranks.survey import Survey
from hsprobe.diagnose.registry import rank_findings
from hsprobe.diagnose.settle import same_process_noise
from hsprobe.errors import HsprobeError
from hsprobe.remote.location import Location
from hsprobe.trace.reader import Trace


def between_ranks(infer: Location | str) -> SelfReport:
    """Compare the ranks of a capture with one another, and look at what they hold jointly.

    Raises:
        HsprobeError: the file is unreadable, or holds one rank alone.
    """
    with Trace.open(infer) as trace:
        survey = Survey(trace, "infer")
        side, facts = survey.run()
        if not facts.several:
            raise HsprobeError(
                f"{trace.path} holds one rank alone: there is nothing to compare between ranks.",
                "Capture a server with several ranks, without '--ranks'.",
            )
        _who_is_right(survey, facts)
        found: list[Finding] = rank_findings([facts])
        made = [_comparison(one) for one in facts.comparisons if one.sites]
        notes = list(facts.notes)
        if not made:
            notes.append("No two of the ranks should hold the same rows, so none could be compared.")
        rows = max((stack for stack in side.stacks.values()), key=lambda stack: len(stack.keys.usable)).keys
        contexts = len(np.unique(rows.context[rows.usable]))
        return SelfReport(not found, side.summary(), made, found, len(rows.usable), contexts, 0, notes)


def _comparison(found: RankComparison) -> Comparison:
    sites = [SiteLine(s.site, s.line, s.worst, s.worst_at) for s in found.sites]
    left, right = (f"rank {member.index}" for member in (found.member, found.against))
    return Comparison(RANKS, left, right, max(s.line.rows for s in sites), sites)


def _who_is_right(survey: Survey, facts: RankFacts) -> None:
    """Where ranks differ in what the draft is handed, the rank's own stream may say which of them is "
    "right."""
    for group in facts.classes:
        if len(group) < 2 or facts.partials:
            continue
        contradicted = [_contradicts(survey, members) for members in group]
        wrong = [members for members, bad in zip(group, contradicted, strict=True) if bad]
        largest = max(len(members) for members in group)
        if wrong and len(wrong) < len(group):
            facts.wrong |= {member.number for members in wrong for member in members}
        elif sum(len(members) == largest for members in group) > 1:
            facts.undecided = True
        else:
            facts.wrong |= {m.number for members in group if len(members) < largest for m in members}


def _contradicts(survey: Survey, members: Sequence[Member]) -> bool:
    """Whether a rank hands over what its own stream does not hold."""
    side = survey.side_of(members[0])
    layers = side.layers
    for name in CHUNKED:
        stack = side.stacks.get(name)
        for lane in survey.replicas.lanes(stack) if stack is not None else []:
            other = layers.get(lane.depth)
            if other is not None and not _agrees(lane, other):
                return True
    return False


def _agrees(lane: Lane, other: Lane) -> bool:
    noise = same_process_noise(lane.stack)(0)
    direct = compare(lane, other, Level(noise).row_limit, pair(lane.stack, other.stack))
    return all(rows_ok(stats, noise) for stats in direct.by_phase.values())
