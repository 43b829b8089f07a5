"""What a rule is, what it says, and what a check reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hsprobe.check.captured import Captured
    from hsprobe.check.setup import Setup


class Severity(Enum):
    """How bad it is. An error makes the draft see what it was not trained on, or stops the server."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True)
class Said:
    """What a rule found.

    Attributes:
        text: what is wrong, one sentence without its full stop.
        change: the key with its old and new value, where there is one.
        mend: what to do, sentences; the rule's own words where it is empty.
        severity: where it is not the rule's own.
    """

    text: str
    change: str | None = None
    mend: tuple[str, ...] = ()
    severity: Severity | None = None


@dataclass(frozen=True)
class RuleText:
    """A rule in words: the one source of `hsprobe explain` and docs/check.md.

    Attributes:
        code, name: stable; `CK101` and `EMBEDDING_ID`.
        severity: of most of its findings.
        summary: what it finds, in one line.
        why: what follows from it in service.
        mend: what to change.
        sources: where to read about it: a thread's address, or a file of SGLang and the version read.
    """

    code: str
    name: str
    severity: Severity
    summary: str
    why: str
    mend: str
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Rule:
    """A rule and the function that tries it."""

    text: RuleText
    find: Callable[[Setup], Iterable[Said]]


@dataclass(frozen=True)
class Problem:
    """One finding of a rule."""

    code: str
    name: str
    severity: Severity
    text: str
    change: str | None
    mend: tuple[str, ...]
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Side:
    """One of the two models, for the report."""

    path: str
    architecture: str
    num_layers: int | None
    hidden_size: int | None
    dtype: str | None
    weights: str


@dataclass(frozen=True)
class CheckReport:
    """What came of a check. `version_from`, `algorithm_from`: how they came to be known."""

    target: Side
    draft: Side
    version: str
    version_from: str
    algorithm: str
    algorithm_from: str
    captured: Captured
    rules: int
    problems: list[Problem] = field(default_factory=list)

    def count(self, severity: Severity) -> int:
        """How many problems of a severity there are."""
        return sum(problem.severity is severity for problem in self.problems)


RULES: dict[str, Rule] = {}
"""Code -> rule, filled as the modules of `hsprobe.check.rules` are imported."""


def rule(
    code: str,
    name: str,
    severity: Severity,
    *,
    summary: str,
    why: str,
    mend: str,
    sources: tuple[str, ...],
) -> Callable[[Callable[[Setup], Iterable[Said]]], Callable[[Setup], Iterable[Said]]]:
    """Enter a function as a rule; the arguments are those of `RuleText`."""

    def enter(find: Callable[[Setup], Iterable[Said]]) -> Callable[[Setup], Iterable[Said]]:
        if code in RULES:
            raise ValueError(f"{code} is given twice")
        RULES[code] = Rule(RuleText(code, name, severity, summary, why, mend, sources), find)
        return find

    return enter
