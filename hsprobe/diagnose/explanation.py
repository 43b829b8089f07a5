"""What a fault class is, in words: the one source of `hsprobe explain` and docs/faults.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hsprobe.diagnose.model import Finding, Mend

GROUPS = {
    "HS1": "Which depths are served",
    "HS2": "Which form of the state is served",
    "HS3": "Which rows are served",
    "HS4": "Which tokens the rows belong to",
    "HS5": "Which values the states have",
    "HS6": "What the draft receives",
    "HS7": "Ranks",
    "HS8": "What the draft computes",
}


@dataclass(frozen=True)
class Explanation:
    """One fault class.

    Attributes:
        code, name: stable; `HS101` and `LAYER_SHIFT`.
        summary: what is wrong, in one line.
        symptom: how it shows in service.
        cause: how it comes about.
        evidence: the test that separates it from its neighbours.
        mend: what to change.
    """

    code: str
    name: str
    summary: str
    symptom: str
    cause: str
    evidence: str
    mend: str

    def finding(
        self,
        title: str,
        *,
        rank: int,
        confidence: float,
        evidence: Sequence[str] = (),
        mend: Mend | None = None,
        chunks: Sequence[int] = (),
        agree: int = 0,
        rows: int = 0,
        tally: str = "rows agree",
    ) -> Finding:
        """A finding of this class; the arguments are those of `Finding`."""
        return Finding(
            code=self.code,
            name=self.name,
            title=title,
            rank=rank,
            confidence=confidence,
            evidence=list(evidence),
            mend=mend or Mend(steps=[self.mend]),
            chunks=list(chunks),
            agree=agree,
            rows=rows,
            tally=tally,
        )


def section(found: Explanation) -> list[tuple[str, str]]:
    """The parts of an explanation, each with its heading, in the order in which they are shown."""
    return [
        ("Symptom", found.symptom),
        ("Cause", found.cause),
        ("Evidence", found.evidence),
        ("Mend", found.mend),
    ]


def page(catalogue: Sequence[Explanation]) -> str:
    """docs/faults.md, from all fault classes in the order of their codes."""
    lines = [
        "# Faults that hsprobe names",
        "",
        "Each finding of `hsprobe diff` carries one of these codes; `hsprobe explain CODE` prints its entry.",
        "Codes are stable: a class may come to be found by better evidence, its code stays.",
        "",
        "| code | name | what is wrong |",
        "| --- | --- | --- |",
        *(f"| [{e.code}](#{e.code.lower()}-{e.name.lower()}) | {e.name} | {e.summary} |" for e in catalogue),
    ]
    group = ""
    for found in catalogue:
        if found.code[:3] != group:
            group = found.code[:3]
            lines += ["", f"## {GROUPS.get(group, group)} ({group}xx)"]
        lines += ["", f"### {found.code} {found.name}", "", f"{found.summary}."]
        for heading, text in section(found):
            lines += ["", f"**{heading}.** {text}"]
    return "\n".join(lines) + "\n"
