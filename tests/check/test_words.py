"""Every rule explains itself, in one place."""

import re
from pathlib import Path

import pytest

from hsprobe.check.registry import GROUPS, all_rules, catalogue, page, section
from hsprobe.cli import main
from hsprobe.diagnose.registry import catalogue as faults

_DOCS = Path(__file__).parents[2] / "docs" / "check.md"
_WRITE = (
    "write docs/check.md anew: python -c 'from hsprobe.check import registry; "
    'print(registry.page(), end="")\' > docs/check.md'
)


def test_the_page_says_what_explain_says() -> None:
    assert _DOCS.read_text(encoding="utf-8") == page(), _WRITE


def test_codes_and_names_are_stable_in_shape_and_unique() -> None:
    codes = [text.code for text in catalogue()]
    assert codes == sorted(set(codes))
    assert all(re.fullmatch(r"CK[1-9]\d\d", code) and code[:3] in GROUPS for code in codes)
    names = [text.name for text in catalogue()] + [fault.name for fault in faults()]
    assert len(set(names)) == len(names), "a name that a fault class or another rule has"


@pytest.mark.parametrize("text", catalogue(), ids=lambda text: text.code)
def test_every_rule_says_all_of_it_in_sentences(text) -> None:
    for heading, words in section(text):
        assert words.endswith("."), heading
    assert len(text.why) > 30
    assert not text.summary.endswith(".")
    assert all(re.match(r"https://|sglang/srt/|docs/", source) for source in text.sources)
    assert text.sources


def test_a_rule_is_documented() -> None:
    assert all(rule.find.__doc__ for rule in all_rules())


@pytest.mark.parametrize("name", ["CK102", "ck102", "ignored_ids"])
def test_explain_prints_one_rule(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["explain", name]) == 0
    text = capsys.readouterr().out
    assert text.startswith("CK102 IGNORED_IDS  layer ids stand under a key")
    assert max(len(line) for line in text.splitlines()) <= 80


def test_explain_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    text = capsys.readouterr().out
    assert all(rule.code in text for rule in catalogue())
