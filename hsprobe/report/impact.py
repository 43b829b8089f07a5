"""What the served states cost, for people and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from hsprobe import __version__
from hsprobe.diagnose.naming import plural
from hsprobe.impact.model import Acceptance, Cost, ImpactReport
from hsprobe.report import json
from hsprobe.report.terminal import block, new_table, note_blocks, printed, spaced

SCHEMA_VERSION = 1

_BAD, _GOOD, _DIM = "bold red", "bold green", "dim"
_OTHER = {"TRAIN": "INFER", "INFER": "TRAIN"}


def write(report: ImpactReport, form: str, stream: TextIO) -> None:
    """Write the report as "text" or "json"."""
    if form == "json":
        json.dump(document(report), stream)
        return
    console = Console(file=stream, highlight=False, emoji=False, markup=False)
    stream.write(printed(render(report), console))


def document(report: ImpactReport) -> dict[str, Any]:
    """The report as plain data; a figure that does not exist is null."""
    facts: dict[str, Any] = json.plain(report)
    reported = report.reported
    if reported is not None:
        facts["reported"] |= {
            "server": _acceptance(reported.server),
            "predicted": _acceptance(reported.predicted),
            "error": reported.error,
        }
    facts |= {"trained": _acceptance(report.trained), "served": _acceptance(report.served)}
    for entry, cost in zip(facts["costs"], report.costs, strict=True):
        entry |= {"alone": _acceptance(cost.alone), "mended": _acceptance(cost.mended)}
    return {
        "schema_version": SCHEMA_VERSION,
        "hsprobe_version": __version__,
        "verdict": "loses" if report.lost else "no loss",
        **facts,
    }


def _acceptance(found: Acceptance) -> dict[str, Any]:
    plain: dict[str, Any] = json.plain(found)
    return plain | {"length": found.length, "steps": found.steps}


def render(report: ImpactReport) -> RenderableType:
    """The report as something rich can print."""
    foot = Group(*_counted(report), *note_blocks(report.notes))
    if not report.lost and not report.costs:
        return Group(_verdict(report), foot)
    parts = [_verdict(report), _lengths(report), foot]
    if report.costs:
        parts.insert(1, _costs(report.costs, report.trained))
    return Group(*spaced(parts))


def _verdict(report: ImpactReport) -> RenderableType:
    trained, served = _number(report.trained.length), _number(report.served.length)
    most = f"at most {report.steps + 1}"
    if not report.lost:
        lines = [
            Text("the served states cost no acceptance"),
            Text(f"accept length {served} as served, {trained} as trained ({most})"),
        ]
        return block(Text("OK", style=_GOOD), [*lines, *_against_server(report)])
    lines = []
    if report.states_cost:
        lines += [
            Text(f"the served states cost {report.loses:.2f} of {trained} tokens a verify pass", style=_BAD),
            Text(f"accept length {served} as served, {trained} as trained ({most})"),
        ]
    lines += _against_server(report)
    found = report.reported
    if report.draft_costs and found is not None:
        lines += [
            Text(
                f"the server accepts {found.lacks:.2f} tokens less than this draft does on the same states",
                style=_BAD,
            ),
            *(Text(f"- {fault}") for fault in report.draft_faults),
            Text(f"> Its draft is another, or built otherwise: hsprobe diff INFER --draft {report.draft}"),
        ]
    return block(Text("LOSS", style=_BAD), lines)


def _against_server(report: ImpactReport) -> list[Text]:
    found = report.reported
    if found is None or found.error is None:
        return [Text("the server reported no acceptance that this could be held against", style=_DIM)]
    return [
        Text(
            f"SGLang counted {_number(found.server.length)}, predicted {_number(found.predicted.length)} "
            f"({found.error:+.1%}) for the same {plural(found.requests, 'request')}"
        )
    ]


def _costs(costs: Sequence[Cost], trained: Acceptance) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style=_DIM)
    table.add_column("alone costs", justify="right", no_wrap=True)
    table.add_column("mended gives", justify="right", no_wrap=True)
    table.add_column("finding", overflow="fold")
    for cost in costs:
        table.add_row(
            Text(f"{cost.loses:.2f} of {_number(trained.length)}", style=_BAD if cost.loses > 0 else ""),
            f"{cost.gains:+.2f}",
            "\n".join(f"{code}: {title}" for code, title in zip(cost.codes, cost.titles, strict=True)),
        )
    if not any(len(cost.codes) > 1 for cost in costs):
        return table
    return Group(
        table, Text("Findings of one row meet in a chunk and cannot be undone one by one.", style=_DIM)
    )


def _lengths(report: ImpactReport) -> RenderableType:
    columns = [(f"step {step}", "r") for step in range(1, report.steps + 1)]
    table = new_table(("states", "l"), ("accept length", "r"), *columns, ("tokens", "r"), ("passes", "r"))
    rows = [("as trained", report.trained), ("as served", report.served)]
    if len(report.costs) > 1:
        rows += [(f"as served, {_codes(cost)} mended", cost.mended) for cost in report.costs]
    if report.reported is not None:
        rows.append(("SGLang's own count", report.reported.server))
    for name, found in rows:
        rates = ["-" if rate is None else f"{rate:.2f}" for rate in found.steps]
        rates += ["-"] * (report.steps - len(rates))
        table.add_row(name, _number(found.length), *rates, f"{found.tokens:,}", f"{found.passes:,}")
    head = (
        "accept length: tokens a verify pass; step: its token accepted, of passes with all before it accepted"
    )
    return Group(table, Text(head, style=_DIM))


def _codes(cost: Cost) -> str:
    return " and ".join(code.split()[0] for code in cost.codes)


def _counted(report: ImpactReport) -> list[RenderableType]:
    lines = [
        f"{plural(report.requests, 'request')}, {plural(report.heads, 'position')} to draft from, "
        f"chains of {report.steps}, draft {report.draft}"
    ]
    lines += [f"{plural(count, 'request')} left out: {reason}" for reason, count in report.left_out.items()]
    lines += [
        f"{plural(count, 'prompt row')} that {side} lacks taken from {_OTHER[side]}, where they cost nothing"
        for side, count in report.filled.items()
    ]
    return [Text(line, style=_DIM) for line in lines]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
