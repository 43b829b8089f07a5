"""Ranks and the draft's stages in the reports that are pages: a sentence while all is well, else a table."""

from __future__ import annotations

import math
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hsprobe.diagnose import Report, diff
from hsprobe.diagnose.detail import detail
from hsprobe.diagnose.draft.model import DraftFindings, StageLine
from hsprobe.diagnose.wording import figure
from hsprobe.report import markdown
from hsprobe.report.html import page
from tests.ranks.planted import RankCase, noisy, on_last

FC = StageLine("draft.fc", 3e-8, 1e-7, 120, 0, ok=True, phases={"prefill": 3e-8})
NORM = StageLine("draft.mixed <norm>", 0.4, 1e-7, 120, 118, ok=False, phases={"prefill": 0.5, "verify": 0.3})
NO_ROWS = StageLine("draft.logits", math.nan, 1e-7, 0, 0, ok=True)


class _Sections(HTMLParser):
    """What each section of a page says: its text outside of tables, its tables, and whether one is open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text: dict[str, str] = {}
        self.rows: dict[str, list[list[str]]] = {}
        self.folded: dict[str, bool] = {}
        self._section, self._in_table, self._in_details = "", False, False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "section":
            self._section = str(dict(attrs)["id"])
            self.text[self._section], self.rows[self._section] = "", []
        self._in_details |= tag == "details"
        if tag == "table":
            self._in_table, self.folded[self._section] = True, self._in_details
        if tag == "tr":
            self.rows[self._section].append([])
        if tag in ("td", "th"):
            self.rows[self._section][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_details &= tag != "details"
        self._in_table &= tag != "table"

    def handle_data(self, data: str) -> None:
        if not self._section:
            return
        if self._in_table and self.rows[self._section]:
            self.rows[self._section][-1][-1] += data
        elif not self._in_table:
            self.text[self._section] += data


def _html(report: Report) -> _Sections:
    return _Sections(page.body(report, detail(report), "0"))


@pytest.fixture(scope="module")
def alike(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return diff(*RankCase("", "").write(tmp_path_factory.mktemp("alike"), "float32", 4))


@pytest.fixture(scope="module")
def differing(tmp_path_factory: pytest.TempPathFactory) -> Report:
    case = RankCase("", "", on_last(lambda k, x, held: noisy(x)))
    return diff(*case.write(tmp_path_factory.mktemp("differing"), "float32", 4))


def test_ranks_that_agree_are_a_sentence_with_a_table_to_unfold(alike: Report) -> None:
    found = _html(alike)
    assert "4 ranks, equal bit for bit." in found.text["ranks"]
    assert found.folded["ranks"]
    assert [row[0] for row in found.rows["ranks"]] == ["rank", "1", "2", "3"]


def test_a_rank_that_differs_is_marked_in_an_open_table(differing: Report) -> None:
    found = _html(differing)
    assert not found.folded["ranks"]
    (wrong,) = [row for row in found.rows["ranks"] if row[-1].startswith("aux chunk 0")]
    assert wrong[:3] == ["3", "tp 3", "0"]
    body = page.body(differing, detail(differing), "0").split('id="ranks"')[1].split("</section>")[0]
    assert body.count('<tr class="bad"><th scope="row">3</th>') == body.count('class="bad"') == 1


def test_one_rank_and_no_draft_have_no_section(good: Report) -> None:
    assert not {"ranks", "draft"} & set(_html(good).text)
    assert "draft stage" not in markdown.document(good)


def test_a_draft_as_its_checkpoint_says_is_a_sentence(good: Report) -> None:
    report = replace(good, draft=DraftFindings("models/draft", None, [FC, NO_ROWS]))
    found = _html(report)
    assert (
        "The draft computes what its checkpoint says in 2 stages; nearest to its noise: draft.fc"
        in (found.text["draft"])
    )
    assert found.folded["draft"]
    assert [row[0] for row in found.rows["draft"]] == ["stage", "draft.fc", "draft.logits"]
    text = markdown.document(report)
    assert "the draft computes what its checkpoint says in 2 stages" in text
    assert "<details><summary>Every stage of the draft" in text


def test_a_stage_that_differs_is_marked_and_its_name_escaped(good: Report) -> None:
    report = replace(good, same=False, draft=DraftFindings("models/<draft>", None, [FC, NORM]))
    found = _html(report)
    assert "The draft against models/<draft>." in found.text["draft"]
    assert not found.folded["draft"]
    assert found.rows["draft"][2] == [
        "draft.mixed <norm>", "0.40", figure(1e-7), "118/120", "prefill 0.50, verify 0.30",
    ]  # fmt: skip
    text = markdown.document(report)
    assert "<details open><summary>Every stage of the draft" in text
    (line,) = [line for line in text.splitlines() if line.startswith("| draft.mixed")]
    assert line.endswith("| 118/120 | **differs** |")
    assert "<norm>" not in line


def test_a_draft_of_which_nothing_was_captured_is_said_to_be_so(good: Report) -> None:
    report = replace(good, draft=DraftFindings("models/draft", None))
    found = _html(report)
    assert "No stage of the draft was captured." in found.text["draft"]
    assert found.rows["draft"] == []
    assert "no stage of the draft was captured" in markdown.document(report)


def test_both_are_in_the_page_that_the_command_writes(tmp_path: Path) -> None:
    from hsprobe.cli import main

    train, infer = RankCase("", "").write(tmp_path, "float32", 2)
    out = tmp_path / "report.html"
    assert main(["diff", str(train), str(infer), "--format", "html", "-o", str(out)]) == 0
    assert 'id="ranks"' in out.read_text()
