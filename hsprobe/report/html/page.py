"""The page's text: findings, tables and the places of the charts. Everything from a trace is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from hsprobe.diagnose.detail import Detail, Origin
from hsprobe.diagnose.draft.model import DraftFindings
from hsprobe.diagnose.model import Finding, Ranks, Report, State
from hsprobe.diagnose.naming import depth_name, short
from hsprobe.diagnose.wording import figure
from hsprobe.report import draft as draft_words
from hsprobe.report import ranks as rank_words
from hsprobe.report.cases import clear_sentence


def body(report: Report, found: Detail, version: str) -> str:
    """Everything between <body> and the scripts."""
    verdict = "same" if report.same else "different"
    parts = [
        '<a class="skip" href="#findings">Skip to the findings</a>',
        f'<header><h1>hsprobe <span class="verdict {verdict}">{verdict}</span></h1>',
        f"<p>{escape(report.train.path)} against {escape(report.infer.path)}</p></header><main>",
        _section("findings", "Findings", _findings(report)),
        _section("chunks", "Chunks", _chunks(report)),
        _section("identification", "Which depth is which", _heatmap(found)) if found.heatmap else "",
        _section("growth", "Error by depth", _growth(report)) if report.layers else "",
        _section("ranks", "Ranks", _ranks(report.ranks)) if report.ranks else "",
        _section("draft", "The draft, stage by stage", _draft(report.draft)) if report.draft else "",
        _section("positions", "Error by position and phase", _positions()) if found.positions else "",
        _section("worst", "Worst rows", _worst(found)) if found.worst else "",
        _section("coverage", "Coverage", _coverage(report)),
        _section("origin", "Where both sides are from", _origins(found)),
        f"</main><footer>hsprobe {escape(version)}</footer>",
    ]
    return "\n".join(part for part in parts if part)


def _section(name: str, title: str, inner: str) -> str:
    head = f'<h2 id="{name}-title">{title}</h2>'
    return f'<section id="{name}" aria-labelledby="{name}-title">{head}{inner}</section>'


def _findings(report: Report) -> str:
    if report.same:
        found = f'<div class="finding clear"><h3>{escape(clear_sentence(report))}</h3></div>'
    else:
        found = "".join(_finding(finding) for finding in report.findings)
    return found + "".join(f'<p class="note">Note: {escape(note)}</p>' for note in report.notes)


def _finding(finding: Finding) -> str:
    strength = f"confidence {finding.confidence:.2f}"
    if finding.rows:
        strength += f", {finding.agree:,}/{finding.rows:,} {finding.tally}"
    change = f"<pre>{escape(finding.mend.change)}</pre>" if finding.mend.change else ""
    code = f'<span class="code">{finding.code} {escape(finding.name)}</span>'
    steps = "".join(f"<li><strong>{escape(step)}</strong></li>" for step in finding.mend.steps)
    evidence = "".join(f"<li>{escape(text)}</li>" for text in [strength, *finding.evidence])
    head = f"<h3>{code} {escape(finding.title)}</h3>"
    return f'<article class="finding">{head}{change}<ul>{evidence}{steps}</ul></article>'


def _chunks(report: Report) -> str:
    rows = [
        (
            str(line.index),
            short(line.trained),
            short(line.served),
            figure(line.error),
            figure(line.noise),
            "-"
            if line.margin is None
            else f"{line.margin:,.1f}"
            if line.margin < 1000
            else f"{line.margin:.1e}",
            f"{line.agree:,}/{line.rows:,}",
            line.state.value,
        )
        for line in report.chunks
    ]
    bad = [line.state is not State.OK for line in report.chunks]
    head = ("chunk", "trained on", "served", "error", "noise", "margin", "rows agree", "state")
    return _table("What the draft was trained on, and what it is served", head, rows, bad)


def _heatmap(found: Detail) -> str:
    head = ["tensor", *(short(depth) for depth in found.depths)]
    rows = [(row.name, *("-" if e is None else figure(e) for e in row.errors)) for row in found.heatmap]
    groups = dict.fromkeys(row.group for row in found.heatmap)
    options = "".join(f'<option value="{group}">{group}</option>' for group in groups)
    return (
        "<p>Median row error of each tensor (rows) against each depth of the model (columns). The one strong "
        "cell of a row is the depth that the tensor is; a ring marks the depth it should be.</p>"
        f'<label>Show <select id="heat-group"><option value="">all</option>{options}</select></label>'
        '<div id="heat-chart" class="chart" tabindex="0" role="application" '
        'aria-label="Heatmap. Arrow keys move from cell to cell; the figures are read out."></div>'
        '<p id="heat-cell" class="readout" aria-live="polite">Select a cell: click, or arrow keys.</p>'
        + _folded("The same as a table", _table("Median row error by depth", head, rows))
    )


def _growth(report: Report) -> str:
    rows = [
        (short(line.depth), figure(line.error), figure(line.noise), f"{line.over:,}/{line.rows:,}")
        for line in report.layers
    ]
    bad = [not line.ok for line in report.layers]
    first = report.divergence
    where = (
        f"<p>The streams first differ by more than noise at {escape(depth_name(first.depth))}, in "
        f"{first.phase}, position {first.position} of request {escape(first.request or 'unknown')} "
        f"(token {first.token}).</p>"
        if first
        else ""
    )
    table = _table(
        "Median row error and noise by depth", ("depth", "error", "noise", "rows that differ"), rows, bad
    )
    return f'{where}<div id="growth-chart" class="chart"></div>' + _folded("The same as a table", table)


def _ranks(found: Ranks) -> str:
    rows = [
        (
            str(line.rank), rank_words.place(line), str(line.against), f"{line.rows:,}", figure(line.error),
            figure(line.noise), f"{line.differ:,}/{line.sites:,}", line.first,
        )
        for line in found.lines
    ]  # fmt: skip
    bad = [bool(line.differ) for line in found.lines]
    head = ("rank", "place", "against", "rows", "error", "noise", "sites that differ", "the first")
    return _told(
        found.summary, _table("Each rank against the one that it should equal", head, rows, bad), bad
    )


def _draft(found: DraftFindings) -> str:
    rows = [
        (
            line.site, figure(line.error), figure(line.noise), f"{line.over:,}/{line.rows:,}",
            ", ".join(f"{phase} {figure(error)}" for phase, error in line.phases.items()),
        )
        for line in found.stages
    ]  # fmt: skip
    bad = [not line.ok for line in found.stages]
    head = ("stage", "error", "noise", "rows that differ", "error by phase")
    told = f"the draft against {found.draft}" if any(bad) else "; ".join(draft_words.clear(found))
    return _told(told, _table("What the draft computed against its checkpoint", head, rows, bad), bad)


def _told(sentence: str, table: str, bad: Sequence[bool]) -> str:
    """A sentence, and the table that bears it out: open where something differs, left out where empty."""
    shown = table if any(bad) else _folded("Every one of them", table) if bad else ""
    return f"<p>{escape(sentence[:1].upper() + sentence[1:])}.</p>{shown}"


def _positions() -> str:
    return (
        '<label>Chunk <select id="position-chunk"><option value="">all</option></select></label> '
        '<label>Phase <select id="position-phase"><option value="">all</option></select></label>'
        '<div id="position-chart" class="chart"></div>'
        "<p>Rows that are exactly equal are drawn at 1e-9.</p>"
        + _folded("The same as a table", '<div id="position-table"></div>')
    )


def _worst(found: Detail) -> str:
    rows = [
        (
            str(row.chunk), row.phase, row.request, f"{row.position:,}", str(row.token),
            _context(row.start, row.position, row.around), figure(row.error),
        )
        for row in found.worst
    ]  # fmt: skip
    head = ("chunk", "phase", "request", "position", "token", "token ids around it", "error")
    return (
        '<label>Chunk <select id="worst-chunk"><option value="">all</option></select></label> '
        '<label>Phase <select id="worst-phase"><option value="">all</option></select></label>'
        '<p id="worst-count" class="readout" aria-live="polite"></p>'
        + _table("Rows with the largest errors, chunk by chunk", head, rows, name="worst-table")
    )


def _context(start: int, position: int, around: Sequence[int]) -> str:
    return " ".join(f"[{token}]" if start + n == position else str(token) for n, token in enumerate(around))


def _coverage(report: Report) -> str:
    coverage = report.coverage
    total = (
        f"<p>{coverage.matched:,} of {coverage.train_rows:,} training rows compared "
        f"({coverage.matched_requests:,} of {coverage.train_requests:,} requests).</p>"
    )
    rows = [(f"{count:,}", reason) for reason, count in coverage.reasons.items()]
    drifts = "".join(
        f"<p>Request {escape(drift.train_request)}: token ids differ from position {drift.position} on. From "
        f"{drift.start}: trained <code>{drift.train_ids}</code>, served <code>{drift.infer_ids}</code>.</p>"
        for drift in coverage.drifts
    )
    return total + (_table("Rows without a partner", ("rows", "why"), rows) if rows else "") + drifts


def _origins(found: Detail) -> str:
    rows = [(entry.key, entry.train or "-", entry.infer or "-", _mark(entry)) for entry in found.origins]
    marks = [_mark(entry) == "differs" for entry in found.origins]
    return '<label><input type="checkbox" id="origin-differs"> only what differs</label>' + _table(
        "Provenance", ("entry", "trained", "served", ""), rows, marks, name="origin-table"
    )


def _mark(entry: Origin) -> str:
    if entry.train is None or entry.infer is None:
        return "one side"
    return "differs" if entry.differs else ""


def _table(
    caption: str,
    head: Iterable[str],
    rows: Sequence[Sequence[str]],
    bad: Sequence[bool] | None = None,
    name: str = "",
) -> str:
    """A table whose first column heads its rows; `bad` marks rows."""
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    lines = []
    for number, row in enumerate(rows):
        mark = ' class="bad"' if bad is not None and bad[number] else ""
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        lines.append(f'<tr{mark}><th scope="row">{escape(row[0])}</th>{cells}</tr>')
    mark = f' id="{name}"' if name else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table{mark}>'
        f"<caption>{escape(caption)}</caption><thead><tr>{top}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _folded(title: str, inner: str) -> str:
    return f"<details><summary>{title}</summary>{inner}</details>"
