"""Whether a server agrees with itself, for people and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.text import Text

from hsprobe import __version__
from hsprobe.diagnose.consistency import RANKS, REPEAT, Comparison, SelfReport, SiteLine
from hsprobe.diagnose.model import LayerLine
from hsprobe.diagnose.naming import plural
from hsprobe.diagnose.wording import figure
from hsprobe.report import draft, json, terminal
from hsprobe.report.strip import Strip

SCHEMA_VERSION = 1
# Of many ranks that differ, the tables of so many; all of them are in the overview.
_MOST_RANKS = 2


def write(report: SelfReport, stream: TextIO) -> None:
    """Write the report; colour only where the stream is a terminal and NO_COLOR is not set."""
    console = Console(file=stream, highlight=False, emoji=False, markup=False)
    stream.write(terminal.printed(render(report), console))


def write_json(report: SelfReport, stream: TextIO) -> None:
    """Write the report as one JSON object."""
    facts = {
        "schema_version": SCHEMA_VERSION,
        "hsprobe_version": __version__,
        "verdict": "same" if report.same else "different",
        "infer": report.infer,
        "rows": report.rows,
        "contexts": report.contexts,
        "repeated_contexts": report.repeated,
        "comparisons": report.comparisons,
        "findings": report.findings,
        "draft": report.draft,
        "notes": report.notes,
    }
    json.dump(json.plain(facts), stream)


def render(report: SelfReport) -> RenderableType:
    """The report as something rich can print."""
    tail = [Text(_counts(report)), *terminal.note_blocks(report.notes)]
    if report.same:
        lines = [Text(_clear(report))] if report.comparisons else []
        lines += [Text(line) for line in draft.clear(report.draft)]
        clear = terminal.block(Text("OK", style="bold green"), lines)
        table = [_overview(report.comparisons), Text("")] if report.comparisons else []
        return Group(clear, Text(""), *table, *tail)
    parts: list[RenderableType] = [terminal.finding_block(found) for found in report.findings]
    if any(c.bad for c in report.comparisons if c.kind == REPEAT):
        parts.append(_strip(report.comparisons))
    bad = [c for c in report.comparisons if c.bad]
    parts += [_table(c) for c in bad[: _MOST_RANKS if _of_ranks(report) else len(bad)]]
    if report.comparisons:
        parts.append(_overview(report.comparisons))
    parts += [*draft.tables(report.draft), Group(*tail)]
    return Group(*terminal.spaced(parts))


def _clear(report: SelfReport) -> str:
    return "the ranks agree" if _of_ranks(report) else "the capture agrees with itself"


def _of_ranks(report: SelfReport) -> bool:
    return bool(report.comparisons) and all(found.kind == RANKS for found in report.comparisons)


def _counts(report: SelfReport) -> str:
    if _of_ranks(report):
        return f"{plural(report.rows, 'row')} of the target, {plural(report.contexts, 'context')}"
    return (
        f"{plural(report.rows, 'row')} of the target, {plural(report.contexts, 'context')}, of which "
        f"{report.repeated:,} computed more than once"
    )


def _overview(comparisons: Sequence[Comparison]) -> RenderableType:
    """Everything that was compared, each by the site that comes nearest to its noise."""
    figures = ("rows", "sites", "error", "noise", "passes")
    table = terminal.new_table(("compared", "l"), *((name, "r") for name in figures), ("", "l"))
    for found in comparisons:
        line = max(found.sites, key=_strain).line
        table.add_row(
            found.title,
            f"{found.rows:,}",
            str(len(found.sites)),
            figure(line.error),
            figure(line.noise),
            terminal.passes_at(line.passes_at),
            _mark(not found.bad),
        )
    sources = dict.fromkeys(terminal.SOURCES[s.line.noise_from] for c in comparisons for s in c.sites)
    legend = f"noise: {', '.join(sources)}; passes: the least noise at which it would pass"
    return Group(table, Text(legend, style="dim"))


def _mark(good: bool) -> Text:
    return Text("ok" if good else "!", style="bold green" if good else "bold red")


def _strain(site: SiteLine) -> float:
    line = site.line
    if line.passes_at is None or math.isnan(line.passes_at):
        return -1.0
    return line.passes_at / line.noise


def _strip(comparisons: Sequence[Comparison]) -> RenderableType:
    """Error against noise by depth, a row for each pair of phases."""
    by_depth: dict[object, LayerLine] = {}
    for found in comparisons:
        for site in found.sites:
            line = site.line
            streamed = site.site.startswith("layer/") or line.depth == "final"
            if found.kind != REPEAT or not streamed:
                continue
            worst = max(line.phases, key=lambda p: -1.0 if math.isnan(p.error) else p.error)
            named = replace(worst, phase=found.title, passes_at=line.passes_at, rows=line.rows)
            known = by_depth.setdefault(line.depth, replace(line, phases=[]))
            known.phases.append(named)
    lines = sorted(by_depth.values(), key=lambda line: line.depth if isinstance(line.depth, int) else 1 << 30)
    return Strip(lines)


def _table(found: Comparison) -> RenderableType:
    figures = ("error", "noise", "passes", "differ")
    table = terminal.new_table((found.title, "l"), *((name, "r") for name in figures), ("", "l"))
    shown = found.bad if len(found.sites) > terminal.MOST_DEPTHS else found.sites
    for site in shown[: terminal.MOST_DEPTHS]:
        line = site.line
        table.add_row(
            site.site,
            figure(line.error),
            figure(line.noise),
            terminal.passes_at(line.passes_at),
            f"{line.over:,}/{line.rows:,}",
            _mark(line.ok),
        )
    more = len(shown) - terminal.MOST_DEPTHS
    return Group(table, Text(f"and {plural(more, 'more site')}", style="dim")) if more > 0 else table
