"""Annotations for GitHub, and the summary on the page of the run."""

import io
from pathlib import Path

import pytest

from hsprobe.diagnose import Report
from hsprobe.errors import HsprobeError
from hsprobe.report import github, markdown


def _written(report: Report) -> list[str]:
    stream = io.StringIO()
    github.write(report, stream)
    return stream.getvalue().splitlines()


@pytest.fixture(autouse=True)
def _no_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)


def test_a_finding_is_an_error_on_one_line(bad: Report) -> None:
    errors = [line for line in _written(bad) if line.startswith("::error")]
    assert len(errors) == len(bad.findings) == 1
    assert errors[0].startswith("::error title=hsprobe HS102 LAYER_SET::")
    lines = errors[0].split("::", 2)[2].split("%0A")
    assert lines[0] == bad.findings[0].title
    assert lines[1] == bad.findings[0].mend.change


def test_an_all_clear_is_a_notice(good: Report) -> None:
    (line,) = _written(good)
    assert line.startswith("::notice title=hsprobe::3 aux chunks as trained in ")


def test_the_summary_is_appended_to_the_file_of_the_step(
    bad: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    _written(bad)
    assert summary.read_text() == f"before\n{markdown.document(bad)}"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path))
    with pytest.raises(HsprobeError, match="GITHUB_STEP_SUMMARY"):
        _written(bad)


def test_percent_signs_and_title_marks_are_escaped() -> None:
    assert github.command("error", "a: b, c", "50 %\nmore") == "::error title=a%3A b%2C c::50 %25%0Amore"
