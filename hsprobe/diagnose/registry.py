"""Ask every fault class, most damaging first."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from functools import cache
from typing import Protocol, cast

from hsprobe.diagnose import faults
from hsprobe.diagnose.draft.findings import findings_of
from hsprobe.diagnose.draft.model import DraftFindings
from hsprobe.diagnose.evidence import Evidence
from hsprobe.diagnose.explanation import Explanation
from hsprobe.diagnose.forms import Proposal
from hsprobe.diagnose.model import Finding
from hsprobe.diagnose.producer import in_own_numbers
from hsprobe.diagnose.ranks.facts import RankFacts


class FaultClass(Protocol):
    """What a module in `hsprobe.diagnose.faults` provides; `PROPOSALS`, `NORM` and `of_ranks` may be "
    "absent."""

    EXPLANATION: Explanation
    RANK: int

    def diagnose(self, evidence: Evidence, explained: frozenset[int]) -> list[Finding]:
        """The findings of this class; empty where the evidence does not show it."""
        ...


@cache
def fault_classes() -> tuple[FaultClass, ...]:
    """All modules of `hsprobe.diagnose.faults`, in ascending rank."""
    modules = [
        cast(FaultClass, importlib.import_module(f"{faults.__name__}.{info.name}"))
        for info in pkgutil.iter_modules(faults.__path__)
    ]
    return tuple(sorted(modules, key=lambda module: (module.RANK, module.EXPLANATION.code)))


@cache
def catalogue() -> tuple[Explanation, ...]:
    """What every class is, in the order of the codes."""
    return tuple(sorted((fault.EXPLANATION for fault in fault_classes()), key=lambda found: found.code))


@cache
def proposals() -> tuple[tuple[str, Proposal], ...]:
    """(code, form) for every form that a fault class proposes."""
    return tuple(
        (fault.EXPLANATION.code, cast(Proposal, proposal))
        for fault in fault_classes()
        for proposal in getattr(fault, "PROPOSALS", ())
    )


@cache
def norm_codes() -> dict[str, str]:
    """Which norm was applied ("final" or "layer") -> the code of the class whose fault that is."""
    return {
        cast(str, fault.NORM): fault.EXPLANATION.code for fault in fault_classes() if hasattr(fault, "NORM")
    }


def draft_findings(draft: DraftFindings | None) -> list[Finding]:
    """What is wrong with a draft alone, most damaging first."""
    classes = [fault for fault in fault_classes() if hasattr(fault, "KIND")]
    found = [one for f in classes for one in findings_of(f.KIND, draft, f.EXPLANATION, f.RANK)]
    return sorted(found, key=lambda finding: (finding.rank, -finding.confidence))


def rank_findings(ranks: Sequence[RankFacts]) -> list[Finding]:
    """What is wrong with the ranks of a trace, as far as they tell it themselves."""
    found: list[Finding] = []
    for fault in fault_classes():
        if hasattr(fault, "of_ranks"):
            found += [finding for facts in ranks for finding in fault.of_ranks(facts)]
    return sorted(found, key=lambda finding: (finding.rank, -finding.confidence))


def findings(evidence: Evidence) -> list[Finding]:
    """What is wrong, most damaging first; empty when all is well."""
    found: list[Finding] = []
    explained: set[int] = set()
    for fault in fault_classes():
        new = fault.diagnose(evidence, frozenset(explained))
        found += new
        explained.update(chunk for finding in new for chunk in finding.chunks)
    found = [in_own_numbers(finding, evidence) for finding in found]
    return sorted(found, key=lambda finding: (finding.rank, -finding.confidence))
