"""All rules, by topic, and what they find."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from functools import cache

from hsprobe.check import rules
from hsprobe.check.model import RULES, Problem, Rule, RuleText, Severity
from hsprobe.check.setup import Setup

GROUPS = {
    "CK1": "Which states the draft is handed",
    "CK2": "Algorithm and draft class",
    "CK3": "Widths",
    "CK4": "Vocabulary",
    "CK5": "Positions",
    "CK6": "Norms and biases of the draft",
    "CK7": "Weights",
    "CK8": "What the draft was trained on",
    "CK9": "DFlash and MTP drafts",
}

_ORDER = [Severity.ERROR, Severity.WARNING, Severity.NOTE]


@cache
def all_rules() -> tuple[Rule, ...]:
    """Every rule, in the order of the codes."""
    for info in pkgutil.iter_modules(rules.__path__):
        importlib.import_module(f"{rules.__name__}.{info.name}")
    return tuple(RULES[code] for code in sorted(RULES))


def catalogue() -> tuple[RuleText, ...]:
    """What every rule is, in the order of the codes."""
    return tuple(rule.text for rule in all_rules())


def problems(setup: Setup) -> list[Problem]:
    """What is wrong, errors first, then by code."""
    found = list(_problems(setup))
    return sorted(found, key=lambda problem: (_ORDER.index(problem.severity), problem.code))


def _problems(setup: Setup) -> Iterator[Problem]:
    for one in all_rules():
        for said in one.find(setup):
            yield Problem(
                code=one.text.code,
                name=one.text.name,
                severity=said.severity or one.text.severity,
                text=said.text,
                change=said.change,
                mend=said.mend or (one.text.mend,),
                sources=one.text.sources,
            )


def page() -> str:
    """docs/check.md: all rules in words."""
    lines = [
        "# What `hsprobe check` looks at",
        "",
        "Each finding of `hsprobe check` carries one of these codes; `hsprobe explain CODE` prints its",
        "entry. Codes are stable. An error makes the draft see what it was not trained on, or stops the",
        "server, and the exit code is 1; a warning may well do so (exit code 1 with `--strict`); a note is",
        "for information.",
        "",
        "| code | name | | what it finds |",
        "| --- | --- | --- | --- |",
        *(_row(text) for text in catalogue()),
    ]
    group = ""
    for text in catalogue():
        if text.code[:3] != group:
            group = text.code[:3]
            lines += ["", f"## {GROUPS[group]} ({group}xx)"]
        lines += ["", f"### {text.code} {text.name}", "", f"{text.summary}."]
        for heading, words in section(text):
            lines += ["", f"**{heading}.** {words}"]
    return "\n".join(lines) + "\n"


def _row(text: RuleText) -> str:
    link = f"[{text.code}](#{text.code.lower()}-{text.name.lower()})"
    return f"| {link} | {text.name} | {text.severity.value} | {text.summary} |"


def section(text: RuleText) -> list[tuple[str, str]]:
    """The parts of a rule's entry, each with its heading, in the order in which they are shown."""
    return [
        ("Severity", f"{text.severity.value.capitalize()}."),
        ("Why", text.why),
        ("Mend", text.mend),
        ("Source", "; ".join(text.sources) + "."),
    ]
