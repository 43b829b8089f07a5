"""The report as JUnit XML."""

from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from hsprobe.diagnose import Report, diff
from hsprobe.diagnose.consistency import consistency
from hsprobe.report import junit
from tests.synthetic import Floats, write_infer


def _suite(document: str) -> ElementTree.Element:
    root = ElementTree.fromstring(document)
    assert root.tag == "testsuites"
    (suite,) = root
    cases = suite.findall("testcase")
    assert suite.get("tests") == root.get("tests") == str(len(cases))
    assert suite.get("failures") == str(sum(case.find("failure") is not None for case in cases))
    assert len({(case.get("classname"), case.get("name")) for case in cases}) == len(cases)
    return suite


def test_every_chunk_and_depth_is_a_case(good: Report) -> None:
    suite = _suite(junit.document(good))
    assert suite.get("failures") == "0"
    names = [case.get("name") for case in suite]
    assert len(names) == len(good.chunks) + len(good.layers)
    assert "chunk 0, trained on 3 (layer 2)" in names


def test_a_failure_is_the_finding(bad: Report) -> None:
    suite = _suite(junit.document(bad))
    failed = [case for case in suite if case.find("failure") is not None]
    assert {case.get("classname") for case in failed} == {"hsprobe.aux"}
    assert len(failed) == sum(line.state.value != "ok" for line in bad.chunks)
    failure = failed[0].find("failure")
    assert failure is not None
    assert failure.get("message") == bad.findings[0].title
    change = bad.findings[0].mend.change
    assert change is not None
    assert change in (failure.text or "")
    assert "HS102 LAYER_SET" in (failure.text or "")


def test_a_finding_about_no_chunk_fails_a_case_of_its_own(folder: Path, good: Report) -> None:
    report = diff(folder / "train.h5", write_infer(folder / "two.h5", (3, 6)))
    assert not report.same
    suite = _suite(junit.document(report))
    assert int(suite.get("failures") or 0) >= 1


def test_what_xml_cannot_hold_is_replaced(folder: Path, good: Report) -> None:
    odd = folder / "odd \x08 <&> name.h5"
    odd.write_bytes((folder / "good.h5").read_bytes())
    suite = _suite(junit.document(diff(folder / "train.h5", odd)))
    assert "\N{REPLACEMENT CHARACTER} <&> name" in (suite.get("name") or "")


def test_a_capture_against_itself(folder: Path, good: Report) -> None:
    def handed_over_late(name: str, x: Floats) -> Floats:
        return np.roll(x, 1, axis=0) if name.startswith("draft.input") else x

    fine = consistency(folder / "good.h5")
    assert _suite(junit.document(fine)).get("failures") == "0"
    broken = consistency(write_infer(folder / "late.h5", (3, 6, 8), spoil=handed_over_late))
    assert not broken.same
    assert int(_suite(junit.document(broken)).get("failures") or 0) >= 3
