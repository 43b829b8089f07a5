"""The scripts in `benchmarks/` still run, at sizes at which figures mean nothing; none is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import growth, identification, peak, speed
from benchmarks.bench import PARTS
from benchmarks.table import Row, show

WIDTH = 256


def _names(rows: list[Row]) -> str:
    return "\n".join(row.work for row in rows)


def test_speed_has_a_line_for_every_contender(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "_ROUNDS", 1)
    # SGLang's imports alone take a quarter of a minute.
    monkeypatch.setattr(speed, "comparator", lambda folder, size, dtype, width: (1e-6, 1.0))
    rows = list(speed.measure(1, WIDTH))
    contenders = ("h5diff -p takes", "of reading through h5py", "one process alone takes")
    for name in (*contenders, "whole command", "SGLang's comparator takes"):
        if name.startswith("h5diff") and speed.shutil.which("h5diff") is None:
            continue
        assert _names(rows).count(name) == 2
    assert rows[-1].work == "bf16 against fp32, by the row"
    assert all(row.value > 0 for row in rows)


def test_peak_measures_a_pair_and_a_sparse_pair() -> None:
    rows = list(peak.measure(1, 0, WIDTH))
    assert _names(rows) == "peak memory, pair of 0.000977 GiB"
    assert 0 < rows[0].value < 600


def test_a_sparse_pair_claims_its_bytes_and_takes_no_room(tmp_path: Path) -> None:
    paths = peak.write_sparse(tmp_path, 4096, WIDTH)
    for path in paths:
        assert path.stat().st_size > 4096 * 3 * WIDTH * 2
        assert path.stat().st_blocks * 512 < path.stat().st_size / 2


def test_identification_finds_the_depths() -> None:
    (row,) = identification.measure(512, 64)
    assert row.value > 0


def test_growth_is_fitted_over_four_sizes() -> None:
    rows = list(growth.by_rows(8, 64))
    assert rows[0].note.count(":") == 4


def test_the_table_says_what_was_reached(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [Row("a", 5, "x", 4), Row("b", 5, "s", 4, most=True), Row("c", 5, "s")]
    assert [row.reached for row in rows] == [True, False, None]
    show(rows, tmp_path / "found.json")
    assert "at least 4 x" in capsys.readouterr().out
    written = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [row["reached"] for row in written] == [True, False, None]


def test_every_part_is_a_script_of_its_own() -> None:
    for name in PARTS:
        text = Path("benchmarks", f"{name}.py").read_text(encoding="utf-8")
        assert "def main() -> None:" in text
