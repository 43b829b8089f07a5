"""The report as a comment on a pull request."""

from pathlib import Path

from hsprobe.diagnose import Report, diff
from hsprobe.report import markdown
from tests.synthetic import L, write_train


def _tables(text: str) -> list[list[list[str]]]:
    """Tables as rows of cells."""
    tables: list[list[list[str]]] = [[]]
    for line in text.splitlines():
        if line.startswith("| "):
            tables[-1].append([cell.strip() for cell in line.strip("|").split(" | ")])
        elif tables[-1]:
            tables.append([])
    return [table for table in tables if table]


def test_the_finding_and_the_line_to_change_come_first(bad: Report) -> None:
    text = markdown.document(bad)
    assert text.splitlines()[0] == "### hsprobe: different"
    assert "**HS102 LAYER\\_SET**" in text.splitlines()[2]
    assert f"```\n{bad.findings[0].mend.change}\n```" in text
    assert text.index("```") < text.index("| chunk |")


def test_tables_are_square_and_say_what_the_report_says(bad: Report) -> None:
    (chunks,) = _tables(markdown.document(bad))
    assert {len(row) for row in chunks} == {len(chunks[0])}
    assert [row[1] for row in chunks[2:]] == ["3 (layer 2)", "6 (layer 5)", "8 (layer 7)"]
    assert [row[2] for row in chunks[2:]] == ["0 (embedding)", "3 (layer 2)", "6 (layer 5)"]


def test_every_depth_of_a_whole_model_is_in_a_table(folder: Path, good: Report) -> None:
    report = diff(write_train(folder / "all.h5", every=True), folder / "good.h5")
    chunks, layers = _tables(markdown.document(report))
    assert len(chunks) == 2 + 3
    assert len(layers) == 2 + len(report.layers) == 2 + L + 2


def test_an_all_clear_says_so_and_folds_the_rest(good: Report) -> None:
    text = markdown.document(good)
    assert text.startswith("### hsprobe: same\n\n3 aux chunks as trained")
    assert "<details><summary>" in text or not good.layers
    assert "```" not in text


def test_reasons_for_missing_rows_are_a_list(bad: Report) -> None:
    text = markdown.document(bad)
    listed = [line.split() for line in text.splitlines() if line.startswith("- ")]
    total = sum(int(words[1]) for words in listed if words[1].isdigit())
    assert f"{bad.coverage.matched:,} of {bad.coverage.train_rows:,} training rows compared" in text
    assert total == bad.coverage.train_rows - bad.coverage.matched
    assert "token ids differ from position 20 on" in text


def test_names_cannot_smuggle_in_markup() -> None:
    assert markdown._escaped("<img src=x> *a* |b|") == "\\<img src=x\\> \\*a\\* \\|b\\|"
