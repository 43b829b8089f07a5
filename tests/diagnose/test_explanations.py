"""Every fault class explains itself, in one place."""

import re
from pathlib import Path

import pytest

from hsprobe.cli import main
from hsprobe.diagnose.explanation import page, section
from hsprobe.diagnose.registry import catalogue, fault_classes

_DOCS = Path(__file__).parents[2] / "docs" / "faults.md"
_WRITE = (
    "write docs/faults.md anew: python -c 'from hsprobe.diagnose import explanation, registry; "
    'print(explanation.page(registry.catalogue()), end="")\' > docs/faults.md'
)


def test_the_page_says_what_explain_says() -> None:
    assert _DOCS.read_text(encoding="utf-8") == page(catalogue()), _WRITE


def test_codes_and_names_are_stable_in_shape_and_unique() -> None:
    codes = [found.code for found in catalogue()]
    assert codes == sorted(set(codes))
    assert all(re.fullmatch(r"HS[1-8]\d\d", code) for code in codes)
    names = [found.name for found in catalogue()]
    assert len(set(names)) == len(names)
    assert {f"HS{number}" for number in (101, 104, 201, 205, 301, 305, 401, 403, 501, 504, 599)} <= set(codes)


def test_every_class_says_all_of_it_in_sentences() -> None:
    for found in catalogue():
        for heading, text in section(found):
            assert len(text) > 30, (found.code, heading)
            assert text.endswith("."), (found.code, heading)
        assert not found.summary.endswith(".")


def test_a_module_a_class() -> None:
    assert len(fault_classes()) == len(catalogue())


@pytest.mark.parametrize("name", ["HS203", "hs203", "alias"])
def test_explain_prints_one_class(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["explain", name]) == 0
    text = capsys.readouterr().out
    assert text.startswith("HS203 ALIAS  the captured buffer was written over")
    assert [line.split()[0] for line in text.splitlines() if line and line[0] in "scem"] == [
        "symptom", "cause", "evidence", "mend",
    ]  # fmt: skip
    assert max(len(line) for line in text.splitlines()) <= 80


def test_explain_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    text = capsys.readouterr().out
    assert all(found.code in text for found in catalogue())


def test_no_such_code_is_trouble(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "HS999"]) == 2
    assert "HS101" in capsys.readouterr().err
