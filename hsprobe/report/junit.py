"""The report as JUnit XML: one suite, a case for every chunk and depth, the finding as the failure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TextIO
from xml.etree import ElementTree

from hsprobe.diagnose.consistency import SelfReport
from hsprobe.report.cases import AnyReport, Case, cases_of

# What XML 1.0 cannot hold, not even escaped.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def write(report: AnyReport, stream: TextIO) -> None:
    """Write the report as one XML document."""
    stream.write(document(report))


def document(report: AnyReport) -> str:
    """The XML, with its declaration."""
    return suite(_name(report), cases_of(report))


def suite(name: str, cases: Sequence[Case]) -> str:
    """A document of one suite."""
    counts = {
        "tests": str(len(cases)),
        "failures": str(sum(case.result == "failed" for case in cases)),
        "errors": "0",
        "skipped": str(sum(case.result == "skipped" for case in cases)),
    }
    root = ElementTree.Element("testsuites", {"name": "hsprobe", **counts})
    holder = ElementTree.SubElement(root, "testsuite", {"name": _clean(name), **counts})
    for case in cases:
        names = {"classname": f"hsprobe.{case.group}", "name": case.name, "time": "0"}
        element = ElementTree.SubElement(
            holder, "testcase", {key: _clean(text) for key, text in names.items()}
        )
        told = _clean("\n".join(case.lines))
        if case.result == "failed":
            failure = {"message": _clean(case.message), "type": "finding"}
            ElementTree.SubElement(element, "failure", failure).text = told
        elif case.result == "skipped":
            ElementTree.SubElement(element, "skipped", {"message": _clean(case.message)})
        else:
            ElementTree.SubElement(element, "system-out").text = told
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


def _name(report: AnyReport) -> str:
    if isinstance(report, SelfReport):
        return f"hsprobe diff {report.infer.path}"
    return f"hsprobe diff {report.train.path} {report.infer.path}"


def _clean(text: str) -> str:
    return _FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", text)
