"""Which formats there are, by the name that `--format` takes."""

from __future__ import annotations

from typing import TextIO

from hsprobe.diagnose.consistency import SelfReport
from hsprobe.errors import HsprobeError
from hsprobe.report.cases import AnyReport


def write(report: AnyReport, form: str, stream: TextIO) -> None:
    """Write a report in the format of that name: the same facts in every one."""
    from hsprobe.report import consistency, github, json, junit, markdown, terminal

    if form == "html":
        if isinstance(report, SelfReport):
            raise HsprobeError(
                "There is no HTML report of one capture alone.",
                "Give a training dump too, or another --format.",
            )
        from hsprobe.report import html

        html.write(report, stream)
    elif form in ("junit", "github", "markdown"):
        {"junit": junit, "github": github, "markdown": markdown}[form].write(report, stream)
    elif isinstance(report, SelfReport):
        (consistency.write_json if form == "json" else consistency.write)(report, stream)
    else:
        (json.write if form == "json" else terminal.write)(report, stream)
