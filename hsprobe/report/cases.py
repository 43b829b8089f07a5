"""A report as checks that passed or failed, and its findings in plain lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from hsprobe.diagnose.consistency import SelfReport
from hsprobe.diagnose.model import ChunkLine, Finding, LayerLine, Report, State
from hsprobe.diagnose.naming import depth_name, plural, short
from hsprobe.diagnose.wording import figure

AnyReport = Report | SelfReport


@dataclass(frozen=True)
class Case:
    """One check.

    Attributes:
        group, name: what was checked; unique together in a report.
        result: "passed", "failed", or "skipped" where there was nothing to compare.
        message: one line: why it failed or was skipped.
        lines: the figures, and for a failure the findings in full.
    """

    group: str
    name: str
    result: Literal["passed", "failed", "skipped"]
    message: str = ""
    lines: list[str] = field(default_factory=list)


def finding_lines(finding: Finding) -> list[str]:
    """A finding as on the terminal, a sentence a line."""
    strength = f"confidence {finding.confidence:.2f}"
    if finding.rows:
        strength += f", {finding.agree:,}/{finding.rows:,} {finding.tally}"
    lines = [finding.title, *([finding.mend.change] if finding.mend.change else [])]
    lines.append(f"{strength}, {finding.code} {finding.name}")
    return lines + [f"- {text}" for text in finding.evidence] + [f"> {step}" for step in finding.mend.steps]


def clear_sentence(report: AnyReport) -> str:
    """What is right, in one sentence, of a report without findings."""
    if isinstance(report, SelfReport):
        return f"The capture agrees with itself in {plural(report.rows, 'row')} of the target."
    coverage = report.coverage
    what = plural(len(report.chunks), "aux chunk") if report.chunks else plural(len(report.layers), "depth")
    return f"{what} as trained in {coverage.matched:,} of {plural(coverage.train_rows, 'training row')}."


def cases_of(report: AnyReport) -> list[Case]:
    """A check for every chunk and depth (of a single capture: every site), and for every finding beyond.

    Some check has failed exactly where the report has findings.
    """
    if isinstance(report, SelfReport):
        found = list(_sites(report))
    else:
        found = [_chunk(line, report) for line in report.chunks]
        found += [_layer(line, report) for line in report.layers]
    told = {line for case in found for line in case.lines}
    for number, finding in enumerate(report.findings):
        if finding.title not in told:
            name = f"{finding.code} {finding.name}"
            twin = sum(other.code == finding.code for other in report.findings[:number])
            label = f"{name} ({twin + 1})" if twin else name
            found.append(Case("findings", label, "failed", finding.title, finding_lines(finding)))
    return found


def _chunk(line: ChunkLine, report: Report) -> Case:
    name = f"chunk {line.index}, trained on {short(line.trained)}"
    facts = [
        f"served {short(line.served)}; error {figure(line.error)}, noise {figure(line.noise)}; "
        f"{line.agree:,}/{line.rows:,} rows agree"
    ]
    facts += [f"{phase.phase}: error {figure(phase.error)} in {phase.rows:,} rows" for phase in line.phases]
    if line.state is State.NO_ROWS and report.same:
        return Case("aux", name, "skipped", "no rows to compare", facts)
    if line.state is State.OK or report.same:
        return Case("aux", name, "passed", lines=facts)
    mine = [finding for finding in report.findings if line.index in finding.chunks]
    return _failed("aux", name, mine or report.findings, facts)


def _layer(line: LayerLine, report: Report) -> Case:
    name = depth_name(line.depth)
    facts = [_against_noise(line)]
    if line.ok or report.same:
        return Case("layer", name, "passed", lines=facts)
    mine = [finding for finding in report.findings if not finding.chunks]
    return _failed("layer", name, mine or report.findings, facts)


def _sites(report: SelfReport) -> Iterable[Case]:
    for found in report.comparisons:
        for site in found.sites:
            facts = [_against_noise(site.line)]
            if site.line.ok or report.same:
                yield Case(found.title, site.site, "passed", lines=facts)
            else:
                yield _failed(found.title, site.site, report.findings, facts)


def _against_noise(line: LayerLine) -> str:
    error = f"error {figure(line.error)}, noise {figure(line.noise)}"
    return f"{error}; {line.over:,} of {plural(line.rows, 'row')} differ"


def _failed(group: str, name: str, findings: Sequence[Finding], facts: list[str]) -> Case:
    """`findings` are not empty: only a report with findings has failed checks."""
    told = [line for finding in findings for line in finding_lines(finding)]
    return Case(group, name, "failed", findings[0].title, [*told, *facts])
