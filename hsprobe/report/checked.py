"""What a check found, for people and programs: text, JSON, JUnit, annotations for GitHub."""

from __future__ import annotations

from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from hsprobe import __version__
from hsprobe.check.model import CheckReport, Problem, Severity, Side
from hsprobe.check.registry import catalogue
from hsprobe.check.wording import depth_list
from hsprobe.diagnose.naming import plural, short
from hsprobe.report import github, json, junit, terminal
from hsprobe.report.cases import Case

SCHEMA_VERSION = 1
FORMATS = ("text", "json", "junit", "github")

_STYLES = {
    Severity.ERROR: ("FAIL", "bold red"),
    Severity.WARNING: ("warn", "bold yellow"),
    Severity.NOTE: ("note", "yellow"),
}
_GOOD, _DIM, _MEND = "bold green", "dim", "bold"


def write(report: CheckReport, form: str, stream: TextIO) -> None:
    """Write a report in the format of that name."""
    if form == "json":
        json.dump(document(report), stream)
    elif form == "junit":
        stream.write(junit.suite(f"hsprobe check {report.target.path} {report.draft.path}", cases(report)))
    elif form == "github":
        stream.write("".join(f"{line}\n" for line in workflow_commands(report)))
    else:
        console = Console(file=stream, highlight=False, emoji=False, markup=False)
        stream.write(terminal.printed(render(report), console))


def document(report: CheckReport) -> dict[str, object]:
    """The report as plain data."""
    found = report.captured
    facts: dict[str, object] = json.plain(
        {
            "schema_version": SCHEMA_VERSION,
            "hsprobe_version": __version__,
            "verdict": _verdict(report),
            "sglang_version": report.version,
            "sglang_version_from": report.version_from,
            "algorithm": report.algorithm,
            "algorithm_from": report.algorithm_from,
            "target": report.target,
            "draft": report.draft,
            "ids": found.ids,
            "ids_from": found.key,
            "requested_depths": found.requested,
            "captured_depths": ["final"] if found.final else found.depths,
            "rule": found.rule.rule.value if found.rule else None,
            "rules_tried": report.rules,
            "problems": report.problems,
        }
    )
    return facts


def cases(report: CheckReport) -> list[Case]:
    """A case for every rule; one that found only notes has passed."""
    made = []
    for text in catalogue():
        mine = [p for p in report.problems if p.code == text.code]
        bad = [p for p in mine if p.severity is not Severity.NOTE]
        lines = [line for problem in mine for line in _lines(problem)]
        made.append(
            Case(
                "check",
                f"{text.code} {text.name}",
                "failed" if bad else "passed",
                bad[0].text if bad else "",
                lines or [text.summary],
            )
        )
    return made


def workflow_commands(report: CheckReport) -> list[str]:
    """Workflow commands, one a line."""
    kinds = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "notice"}
    lines = [
        github.command(kinds[p.severity], f"hsprobe {p.code} {p.name}", "\n".join(_lines(p)))
        for p in report.problems
    ]
    return lines or [github.command("notice", "hsprobe", _clear(report))]


def render(report: CheckReport) -> RenderableType:
    """The report as something rich can print."""
    parts: list[RenderableType] = [_block(problem) for problem in report.problems]
    if not report.count(Severity.ERROR) and not report.count(Severity.WARNING):
        parts.insert(0, terminal.block(Text("OK", style=_GOOD), [Text(_clear(report))]))
    table = _depths(report)
    if table is not None and report.problems:
        parts.append(table)
    parts.append(_sides(report))
    return Group(*terminal.spaced(parts))


def _block(problem: Problem) -> RenderableType:
    mark, style = _STYLES[problem.severity]
    quiet = problem.severity is Severity.NOTE
    body = [Text(problem.text, style="" if quiet else style)]
    if problem.change:
        body.append(Text(problem.change, style=_MEND))
    body += [Text(f"> {step}", style=_MEND) for step in problem.mend] if not quiet else []
    body.append(Text(f"{problem.code} {problem.name}   {problem.sources[0]}", style=_DIM))
    return terminal.block(Text(mark, style=style), body)


def _depths(report: CheckReport) -> Table | None:
    """Which depth comes in which chunk, and what others call it."""
    found = report.captured
    if found.final or not found.depths:
        return None
    table = terminal.new_table(
        ("chunk", "r"), ("id", "r"), ("depth", "l"), ("SpecForge, ModelOpt id", "r"),
        ("vLLM id, transformers index", "r"),
    )  # fmt: skip
    requested = found.requested or []
    for chunk, depth in enumerate(found.depths):
        at = requested.index(depth) if depth in requested else None
        number = str(found.ids[at]) if found.ids and at is not None and at < len(found.ids) else "default"
        output = str(depth - 1) if depth else "-"
        table.add_row(str(chunk), number, short(depth), output, str(depth))
    for depth in found.lost:
        number = str(found.ids[requested.index(depth)]) if found.ids else "default"
        table.add_row("-", number, Text(f"{short(depth)}, never captured", style="bold red"), "", "")
    return table


def _sides(report: CheckReport) -> RenderableType:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(width=6, no_wrap=True, style=_DIM)
    grid.add_column(overflow="fold", style=_DIM)
    grid.add_row("TARGET", _described(report.target, weights=False))
    grid.add_row("DRAFT", _described(report.draft, weights=True))
    version = f"{report.version} ({report.version_from}), {report.algorithm} ({report.algorithm_from})"
    grid.add_row("SGLANG", version)
    counts = ", ".join(plural(report.count(one), one.value) for one in Severity)
    grid.add_row("RULES", f"{report.rules} tried: {counts}")
    return grid


def _described(side: Side, *, weights: bool) -> str:
    name = side.architecture or "unknown model"
    held = f"; {side.weights}" if weights else ""
    layers = (
        f"{side.num_layers or '?'} layer{'' if side.num_layers == 1 else 's'} of {side.hidden_size or '?'}"
    )
    return f"{side.path} ({name}, {layers}; {side.dtype or 'no dtype'}{held})"


def _clear(report: CheckReport) -> str:
    found = report.captured
    if found.final:
        return f"the draft will be handed the state after the final norm ({report.algorithm})"
    if not found.depths:
        return "nothing was found, and the depths are not known"
    many = len(found.depths) > 1
    what = f"{len(found.depths)} aux chunks will carry depths" if many else "the aux chunk will carry depth"
    return f"{what} {depth_list(found.depths)}"


def _verdict(report: CheckReport) -> str:
    return next((one.value for one in Severity if report.count(one)), "clear")


def _lines(problem: Problem) -> list[str]:
    """A problem in plain lines."""
    lines = [problem.text, *([problem.change] if problem.change else [])]
    return [
        *lines,
        *(f"> {step}" for step in problem.mend),
        f"{problem.code} {problem.name}: {problem.sources[0]}",
    ]
