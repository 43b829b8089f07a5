"""The report as one HTML file that needs nothing else: no network, no other file."""

from __future__ import annotations

import base64
import gzip
import json
from functools import cache
from importlib.resources import files
from typing import TextIO

from hsprobe import __version__
from hsprobe.diagnose.detail import Detail, detail
from hsprobe.diagnose.model import Report
from hsprobe.errors import HsprobeError
from hsprobe.report import json as report_json
from hsprobe.report.html import page


def write(report: Report, stream: TextIO) -> None:
    """Write the report, looking at its two traces once more for what is only in this format.

    Raises:
        HsprobeError: plotly is not installed, or a trace can no longer be read.
    """
    stream.write(document(report, detail(report)))


def document(report: Report, found: Detail) -> str:
    """The page. Text is in it without scripts; charts are drawn by the plotly.js that is packed into it."""
    facts = {"report": report_json.document(report), "detail": report_json.plain(found)}
    # Nothing in the data may end the script element that holds it.
    data = json.dumps(facts, allow_nan=False).replace("<", "\\u003c")
    return "\n".join(
        (
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>hsprobe: {'same' if report.same else 'different'}</title>",
            f"<style>{_own('page.css')}</style></head><body>",
            page.body(report, found, __version__),
            f'<script type="application/json" id="facts">{data}</script>',
            f'<script type="application/octet-stream" id="plotly">{_plotly()}</script>',
            f"<script>{_own('page.js')}</script>",
            "</body></html>",
            "",
        )
    )


def _own(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


@cache
def _plotly() -> str:
    """plotly.js as base64 of gzip, a third of its size, which every current browser can unpack."""
    try:
        source = files("plotly").joinpath("package_data/plotly.min.js").read_bytes()
    except (ModuleNotFoundError, FileNotFoundError):
        raise HsprobeError(
            "--format html needs plotly, which is not installed.", "Install it: pip install 'hsprobe[html]'"
        ) from None
    return base64.b64encode(gzip.compress(source, mtime=0)).decode("ascii")
