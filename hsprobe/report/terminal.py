"""The report for people: three lines when all is well, else the faults first, then the figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from hsprobe.compare.noise import BOTH, FILE, MODEL
from hsprobe.diagnose.model import ChunkLine, Finding, LayerLine, Report, State
from hsprobe.diagnose.naming import depth_name, listed, plural, short
from hsprobe.diagnose.wording import figure
from hsprobe.report import coverage, draft, ranks
from hsprobe.report.strip import Strip

# The strip shows every depth; a table of more than these is no longer read.
MOST_DEPTHS = 16

# Where the noise that a verdict rests on is from.
SOURCES = {MODEL: "model", FILE: "measured", BOTH: "model, measured"}

_BAD, _GOOD, _MEND, _DIM = "bold red", "bold green", "bold", "dim"


def write(report: Report, stream: TextIO) -> None:
    """Write the report; colour only where the stream is a terminal and NO_COLOR is not set."""
    stream.write(printed(render(report), Console(file=stream, highlight=False, emoji=False, markup=False)))


def printed(what: RenderableType, console: Console) -> str:
    """What the console would show, without the blanks that pad its cells."""
    with console.capture() as captured:
        console.print(what)
    return "".join(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def render(report: Report) -> RenderableType:
    """The report as something rich can print."""
    if report.same:
        return Group(_all_clear(report), *note_blocks(report.notes))
    parts: list[RenderableType] = [finding_block(finding) for finding in report.findings]
    if report.chunks:
        parts.append(_chunk_table(report.chunks))
    if any(line.phases for line in report.chunks):
        parts.append(_phase_table(report.chunks))
    if report.layers:
        parts.append(_layers(report))
    parts += draft.tables(report.draft)
    if report.ranks is not None:
        parts.append(ranks.render(report.ranks))
    parts.append(Group(*coverage.lines(report.coverage), *note_blocks(report.notes), _sides(report)))
    return Group(*spaced(parts))


def text(report: Report, width: int = 100) -> str:
    """The report as plain text."""
    console = Console(width=width, highlight=False, emoji=False, markup=False, color_system=None)
    return printed(render(report), console).rstrip()


def _all_clear(report: Report) -> RenderableType:
    lines = report.chunks
    body: list[str] = []
    if lines:
        body.append(_carried(lines))
        margins = [line.margin for line in lines if line.margin is not None]
        closest = f"; margin {_times(min(margins))}" if margins else ""
        body.append(against_noise(max(lines, key=_strain)) + closest)
    if report.layers and not lines:
        body.append(f"{plural(len(report.layers), 'depth')} of the model agree on both sides")
        body.append(against_noise(max(report.layers, key=_strain)))
    elif report.layers:
        body[0] += f"; {plural(len(report.layers), 'depth')} agree"
    body.append(_compared(report))
    body += draft.clear(report.draft)
    if report.ranks is not None:
        body.append(report.ranks.summary)
    return block(Text("OK", style=_GOOD), [Text(line) for line in body])


def _carried(lines: Sequence[ChunkLine]) -> str:
    """`3 aux chunks carry depths 3, 6, 9 as trained`."""
    how = "as asked for" if any(line.trained_from == "asked for" for line in lines) else "as trained"
    many = len(lines) > 1
    what = f"{len(lines)} aux chunks carry" if many else "the aux chunk carries"
    if any(line.trained is None for line in lines):
        return f"{what} what the draft was trained on"
    return f"{what} {'depths' if many else 'depth'} {listed(line.trained for line in lines)} {how}"


def _strain(line: ChunkLine | LayerLine) -> float:
    """What would just pass, in units of the expected noise."""
    if line.passes_at is None or math.isnan(line.passes_at):
        return -1.0
    return line.passes_at / line.noise


def against_noise(line: ChunkLine | LayerLine) -> str:
    """`error 5.7e-07, noise 4.5e-06 (model; 2.5e-07 would pass)`."""
    least = "" if _strain(line) < 0 else f"; {figure(line.passes_at or 0.0)} would pass"
    error = figure(_largest(line))
    return f"error {error}, noise {figure(line.noise)} ({SOURCES[line.noise_from]}{least})"


def _largest(line: ChunkLine | LayerLine) -> float:
    """The median row error of the phase where it is largest; -1 without rows."""
    errors = [phase.error for phase in line.phases if not math.isnan(phase.error)]
    return max(errors, default=-1.0)


def _compared(report: Report) -> str:
    figures = report.coverage
    repeats = f"({figures.repeats:,} repeat others)" if figures.repeats else "compared"
    source = report.chunks or report.layers
    phases = list(dict.fromkeys(p.phase for line in source for p in line.phases))
    return (
        f"{figures.matched:,}/{figures.train_rows:,} training rows {repeats}, "
        f"{figures.matched_requests}/{figures.train_requests} requests ({', '.join(phases)})"
    )


def finding_block(finding: Finding) -> RenderableType:
    body = [Text(finding.title, style=_BAD)]
    strength = f"confidence {finding.confidence:.2f}"
    if finding.rows:
        strength += f"   {finding.agree:,}/{finding.rows:,} {finding.tally}"
    if finding.mend.change:
        body.append(Text(finding.mend.change, style=_MEND))
    body.append(Text(f"{strength}   {finding.code} {finding.name}", style=_DIM))
    body += [Text(f"- {sentence}") for sentence in finding.evidence]
    body += [Text(f"> {step}", style=_MEND) for step in finding.mend.steps]
    return block(Text("FAIL", style=_BAD), body)


def block(mark: Text, body: Sequence[Text]) -> Table:
    """Lines with a hanging indent, the mark before the first."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(width=4, no_wrap=True)
    grid.add_column(overflow="fold")
    for number, line in enumerate(body):
        if line.plain[:2] in ("- ", "> "):
            inner = Table.grid(padding=(0, 1, 0, 0))
            inner.add_column(width=1)
            inner.add_column(overflow="fold")
            inner.add_row(Text(line.plain[0], style=line.style), Text(line.plain[2:], style=line.style))
            grid.add_row(Text(""), inner)
        else:
            grid.add_row(mark if number == 0 else Text(""), line)
    return grid


def new_table(*columns: tuple[str, str]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style=_DIM)
    for name, side in columns:
        table.add_column(name, justify="right" if side == "r" else "left", no_wrap=True)
    return table


def _chunk_table(lines: Sequence[ChunkLine]) -> Table:
    table = new_table(
        ("chunk", "r"), ("trained on", "l"), ("served", "l"), ("error", "r"), ("noise", "r"), ("margin", "r"),
        ("rows", "r"), ("", "l"),
    )  # fmt: skip
    for line in lines:
        good = line.state is State.OK
        served = short(line.served)
        if line.served is None and line.served_chunk is not None:
            served = f"= chunk {line.served_chunk}"
        if line.form or line.origin:
            depth = "?" if line.served is None else str(line.served)
            served = f"{depth}, {'other form' if line.form else 'other rows'}"
        table.add_row(
            str(line.index),
            short(line.trained),
            Text(served, style="" if good else _BAD),
            figure(line.error),
            figure(line.noise),
            _times(line.margin),
            f"{line.agree}/{line.rows}",
            Text("ok" if good else "!", style=_GOOD if good else _BAD),
        )
    return table


def _times(margin: float | None) -> str:
    if margin is None:
        return "-"
    # "1.8e6", not "1.8e+06": a margin is no exact thing.
    return f"{margin:.1e}".replace("e+0", "e").replace("e+", "e") if margin >= 1000 else f"{margin:.1f}"


def _phase_table(lines: Sequence[ChunkLine]) -> RenderableType:
    phases = list(dict.fromkeys(p.phase for line in lines for p in line.phases))
    table = new_table(
        ("chunk", "r"), *((phase, "r") for phase in phases), ("passes at", "r"), ("noise from", "l")
    )
    for line in lines:
        cells: list[str | Text] = [str(line.index)]
        for phase in phases:
            found = next((p for p in line.phases if p.phase == phase), None)
            good = found is None or found.state in (State.OK, State.NO_ROWS)
            cells.append(Text(figure(found.error) if found else "-", style="" if good else _BAD))
        table.add_row(*cells, passes_at(line.passes_at), SOURCES[line.noise_from])
    head = "error by phase, least noise at which a chunk would pass, source of its noise"
    return Group(Text(head, style=_DIM), table)


def passes_at(value: float | None) -> str:
    """For a table cell: the figure, or that no tolerance would do."""
    return "none" if value is None else figure(value)


def _layers(report: Report) -> RenderableType:
    lines = report.layers
    if all(line.ok for line in lines):
        worst = max(lines, key=_strain)
        agree = f"{plural(len(lines), 'depth')} of the model agree on both sides"
        return Text(f"{agree}; at {depth_name(worst.depth)} {against_noise(worst)}")
    table = new_table(
        ("depth", "l"), ("error", "r"), ("noise", "r"), ("from", "l"), ("passes at", "r"), ("differ", "r"),
        ("", "l"),
    )  # fmt: skip
    shown = lines if len(lines) <= MOST_DEPTHS else [line for line in lines if not line.ok][:MOST_DEPTHS]
    for line in shown:
        table.add_row(
            short(line.depth),
            Text(figure(line.error), style="" if line.ok else _BAD),
            figure(line.noise),
            SOURCES[line.noise_from],
            passes_at(line.passes_at),
            f"{line.over:,}/{line.rows:,}",
            Text("ok" if line.ok else "!", style=_GOOD if line.ok else _BAD),
        )
    return Group(Strip(lines, report.divergence), Text(""), table)


def note_blocks(notes: Sequence[str]) -> list[RenderableType]:
    return [block(Text("note", style="yellow"), [Text(note)]) for note in notes]


def _sides(report: Report) -> RenderableType:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(width=5, no_wrap=True, style=_DIM)
    grid.add_column(overflow="fold", style=_DIM)
    for name, side in (("TRAIN", report.train), ("INFER", report.infer)):
        model = (
            f"{side.architecture or 'unknown model'}, {side.num_layers or '?'} layers of {side.hidden_size}"
        )
        grid.add_row(name, f"{side.path} ({side.producer}; {model}; {side.dtype})")
    return grid


def spaced(parts: Sequence[RenderableType]) -> list[RenderableType]:
    spaced: list[RenderableType] = []
    for number, part in enumerate(parts):
        if number:
            spaced.append(Text(""))
        spaced.append(part)
    return spaced
