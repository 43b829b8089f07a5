"""The report for people."""

import io

import pytest

from hsprobe.diagnose import Report
from hsprobe.report import terminal
from tests.synthetic import prompts


def _printed(report: Report, monkeypatch: pytest.MonkeyPatch, **environment: str) -> str:
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    stream = io.StringIO()
    terminal.write(report, stream)
    return stream.getvalue()


def test_three_lines_when_all_is_well(good: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = _printed(good, monkeypatch, COLUMNS="80").splitlines()
    assert len(lines) == 3
    assert lines[0] == "OK    3 aux chunks carry depths 3, 6, 8 as trained"
    assert "noise" in lines[1]
    assert lines[2].endswith("162/162 training rows compared, 4/4 requests (prefill, decode, verify)")


def test_the_fault_comes_first_with_its_mend(bad: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = _printed(bad, monkeypatch, COLUMNS="120").splitlines()
    assert lines[0] == (
        "FAIL  aux chunk 0 carries the embedding output (depth 0); "
        "the draft was trained on depth 3 (output of layer 2)"
    )
    assert lines[1] == "      eagle_aux_hidden_state_layer_ids: [-1, 2, 5]  ->  [2, 5, 7]"
    assert lines[2].split("   ") == [
        "",
        "",
        "confidence 1.00",
        f"{bad.chunks[0].agree}/{bad.chunks[0].rows} rows agree",
        "HS102 LAYER_SET",
    ]


@pytest.mark.parametrize("width", [80, 120])
def test_every_line_fits_and_nothing_is_cut(bad: Report, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    text = _printed(bad, monkeypatch, COLUMNS=str(width))
    assert max(len(line) for line in text.splitlines()) <= width
    assert "…" not in text
    assert not any(line.endswith(" ") for line in text.splitlines())
    joined = " ".join(text.split())
    for finding in bad.findings:
        for sentence in (finding.title, finding.mend.change or "", *finding.evidence, *finding.mend.steps):
            assert " ".join(sentence.split()) in joined


def test_every_chunk_has_its_line(bad: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    text = _printed(bad, monkeypatch, COLUMNS="80")
    assert "3 (layer 2)  0 (embedding)" in text
    assert "6 (layer 5)  3 (layer 2)" in text
    assert "8 (layer 7)  6 (layer 5)" in text


def test_rows_without_a_partner_are_explained(bad: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    text = " ".join(_printed(bad, monkeypatch, COLUMNS="80").split())
    differ = len(prompts()[1]) - 20
    assert f"{162 - differ - 4}/162 training rows compared (4/4 requests)" in text
    assert f"{differ} token ids differ" in text
    assert "4 past the end of the captured request, which is shorter" in text
    assert "request t1: token ids differ from position 20 on" in text


def test_a_pipe_gets_no_colour(bad: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b" not in _printed(bad, monkeypatch)


def test_colour_goes_away_with_no_color(bad: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    forced = _printed(bad, monkeypatch, FORCE_COLOR="1", TERM="xterm-256color")
    plain = _printed(bad, monkeypatch, FORCE_COLOR="1", TERM="xterm-256color", NO_COLOR="1")
    assert "\x1b[1;31m" in forced
    assert "31m" not in plain
