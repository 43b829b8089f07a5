"""The report as Markdown, for a comment on a pull request: findings first, figures in tables below."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TextIO

from hsprobe.compare.coverage import Coverage
from hsprobe.diagnose.consistency import SelfReport
from hsprobe.diagnose.draft.model import DraftFindings
from hsprobe.diagnose.model import ChunkLine, Finding, LayerLine, Ranks, SideSummary, State
from hsprobe.diagnose.naming import short
from hsprobe.diagnose.wording import figure
from hsprobe.report.cases import AnyReport, clear_sentence
from hsprobe.report.draft import clear

_SPECIAL = re.compile(r"([\\`*_\[\]<>|~#&])")


def write(report: AnyReport, stream: TextIO) -> None:
    """Write the report as Markdown that GitHub and GitLab render."""
    stream.write(document(report))


def document(report: AnyReport) -> str:
    """The Markdown."""
    if report.same:
        parts = ["### hsprobe: same", _escaped(clear_sentence(report))]
    else:
        parts = ["### hsprobe: different", *(_finding(found) for found in report.findings)]
    if isinstance(report, SelfReport):
        parts += [_comparisons(report)]
    else:
        parts += [_chunks(report.chunks), _layers(report.layers, report.same), _ranks(report.ranks)]
        parts += [_draft(report.draft), _coverage(report.coverage)]
    parts += [f"> **Note** {_escaped(note)}" for note in report.notes]
    parts.append(_sides(report))
    return "\n\n".join(part for part in parts if part) + "\n"


def _finding(finding: Finding) -> str:
    lines = [f"**{finding.code} {_escaped(finding.name)}**: {_escaped(finding.title)}"]
    if finding.mend.change:
        lines += ["", *_fenced(finding.mend.change), ""]
    strength = f"confidence {finding.confidence:.2f}"
    if finding.rows:
        strength += f", {finding.agree:,}/{finding.rows:,} {finding.tally}"
    lines += ["", *(f"- {_escaped(text)}" for text in [strength, *finding.evidence])]
    lines += [f"- **{_escaped(step)}**" for step in finding.mend.steps]
    return re.sub("\n{3,}", "\n\n", "\n".join(lines))


def _chunks(lines: Sequence[ChunkLine]) -> str:
    rows = [
        [
            str(line.index),
            short(line.trained),
            short(line.served),
            figure(line.error),
            figure(line.noise),
            f"{line.agree:,}/{line.rows:,}",
            "ok" if line.state is State.OK else f"**{line.state.value}**",
        ]
        for line in lines
    ]
    return _table(["chunk", "trained on", "served", "error", "noise", "rows", ""], rows)


def _layers(lines: Sequence[LayerLine], same: bool) -> str:
    rows = [
        [
            short(line.depth),
            figure(line.error),
            figure(line.noise),
            f"{line.over:,}/{line.rows:,}",
            "ok" if line.ok else "**differs**",
        ]
        for line in lines
    ]
    table = _table(["depth", "error", "noise", "rows that differ", ""], rows)
    return table and _folded("Every depth", table, shut=same)


def _ranks(found: Ranks | None) -> str:
    if found is None:
        return ""
    rows = [
        [
            str(line.rank),
            str(line.against),
            figure(line.error),
            figure(line.noise),
            f"**{line.differ} of {line.sites}**, {line.first}" if line.differ else f"0 of {line.sites}",
        ]
        for line in found.lines
    ]
    head = ["rank", "against", "error", "noise", "sites that differ, the first"]
    return "\n\n".join(part for part in (_escaped(f"{found.summary}."), _table(head, rows)) if part)


def _draft(found: DraftFindings | None) -> str:
    if found is None:
        return ""
    rows = [
        [
            line.site,
            figure(line.error),
            figure(line.noise),
            f"{line.over:,}/{line.rows:,}",
            "ok" if line.ok else "**differs**",
        ]
        for line in found.stages
    ]
    table = _table(["draft stage", "error", "noise", "rows that differ", ""], rows)
    same = all(line.ok for line in found.stages)
    return "\n\n".join(
        part
        for part in (
            _escaped("; ".join(clear(found)) if same else f"The draft against {found.draft}") + ".",
            table and _folded("Every stage of the draft", table, shut=same),
        )
        if part
    )


def _comparisons(report: SelfReport) -> str:
    rows = [
        [found.title, str(len(found.sites)), f"{found.rows:,}", f"**{len(found.bad)}**" if found.bad else "0"]
        for found in report.comparisons
    ]
    return _table(["compared", "sites", "rows", "sites that differ"], rows)


def _coverage(coverage: Coverage) -> str:
    total = (
        f"{coverage.matched:,} of {coverage.train_rows:,} training rows compared "
        f"({coverage.matched_requests} of {coverage.train_requests} requests)."
    )
    lines = [total, *(f"- {count:,} {_escaped(reason)}" for reason, count in coverage.reasons.items())]
    for drift in coverage.drifts:
        lines.append(
            f"- {_escaped(drift.train_request)}: token ids differ from position {drift.position} on; "
            f"from {drift.start}: trained `{drift.train_ids}`, served `{drift.infer_ids}`"
        )
    # A list needs a blank line before it.
    return "\n".join([lines[0], *([""] if lines[1:] else []), *lines[1:]])


def _sides(report: AnyReport) -> str:
    sides = [("INFER", report.infer)]
    if not isinstance(report, SelfReport):
        sides.insert(0, ("TRAIN", report.train))
    return "\n".join(f"<sub>{name} {_side(side)}</sub><br>" for name, side in sides).removesuffix("<br>")


def _side(side: SideSummary) -> str:
    model = f"{side.architecture or 'unknown model'}, {side.num_layers or '?'} layers of {side.hidden_size}"
    return _escaped(f"{side.path} ({side.producer}; {model}; {side.dtype})")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    body = [[cell if cell.startswith("**") else _escaped(cell) for cell in row] for row in rows]
    lines = [list(head), ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _folded(title: str, body: str, *, shut: bool) -> str:
    return f"<details{'' if shut else ' open'}><summary>{title}</summary>\n\n{body}\n\n</details>"


def _fenced(text: str) -> list[str]:
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return [fence, text, fence]


def _escaped(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))
