"""Annotations for GitHub Actions, and the Markdown report on the page of the run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TextIO

from hsprobe.errors import HsprobeError
from hsprobe.report import markdown
from hsprobe.report.cases import AnyReport, clear_sentence, finding_lines

SUMMARY = "GITHUB_STEP_SUMMARY"
"""The variable in which GitHub names the file that holds a step's summary."""


def write(report: AnyReport, stream: TextIO) -> None:
    """Write an error a finding, or a notice where all is well, then the notes.

    Where GITHUB_STEP_SUMMARY is set, the Markdown report is appended to the file that it names.

    Raises:
        HsprobeError: that file cannot be written.
    """
    stream.write("".join(f"{line}\n" for line in commands(report)))
    summary = os.environ.get(SUMMARY)
    if summary:
        _append(Path(summary), markdown.document(report))


def commands(report: AnyReport) -> list[str]:
    """The workflow commands, one a line."""
    lines = [
        command("error", f"hsprobe {found.code} {found.name}", "\n".join(finding_lines(found)))
        for found in report.findings
    ]
    if report.same:
        lines.append(command("notice", "hsprobe", clear_sentence(report)))
    return lines + [command("notice", "hsprobe note", note) for note in report.notes]


def command(kind: str, title: str, message: str) -> str:
    """One workflow command: an annotation of this kind (error, warning, notice)."""
    name = _escaped(title).replace(":", "%3A").replace(",", "%2C")
    return f"::{kind} title={name}::{_escaped(message)}"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _append(path: Path, text: str) -> None:
    try:
        with path.open("a", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        reason = error.strerror or str(error)
        raise HsprobeError(
            f"The summary cannot be written to {path}: {reason}.", f"Unset {SUMMARY}, or name another file."
        ) from error
