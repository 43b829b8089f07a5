"""Ask every fault class, most damaging first."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import Protocol, cast

from hsprobe.diagnose import faults
from hsprobe.diagnose.evidence import Evidence
from hsprobe.diagnose.model import Finding


class FaultClass(Protocol):
    """What a module in `hsprobe.diagnose.faults` provides."""

    CODE: str
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
    return tuple(sorted(modules, key=lambda module: (module.RANK, module.CODE)))


def findings(evidence: Evidence) -> list[Finding]:
    """What is wrong, most damaging first; empty when all is well."""
    found: list[Finding] = []
    explained: set[int] = set()
    for fault in fault_classes():
        new = fault.diagnose(evidence, frozenset(explained))
        found += new
        explained.update(chunk for finding in new for chunk in finding.chunks)
    return sorted(found, key=lambda finding: (finding.rank, -finding.confidence))
