"""Where the residual streams of two sides first part, and how the report shows it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from hsprobe.cli import main
from hsprobe.diagnose import Report, diff
from hsprobe.diagnose.model import LayerLine, PhaseLine, State
from hsprobe.report.strip import Strip, level
from tests.synthetic import Floats, L, prompts, write_infer, write_train

FIRST = 5


def _spoil(name: str, x: Floats) -> Floats:
    """The stream from depth FIRST on, twice as far off with every layer; only in verify passes."""
    if name.startswith("layer/") and name.endswith("@verify") and int(name[6:9]) >= FIRST:
        x[:-1:2] *= np.float32(1 + 1e-3 * 2 ** (int(name[6:9]) - FIRST))
    return x


@pytest.fixture(scope="module")
def diverging(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("growth")
    reference = write_train(folder / "reference.h5", every=True)
    return reference, write_infer(folder / "infer.h5", spoil=_spoil)


@pytest.fixture(scope="module")
def report(diverging: tuple[Path, Path]) -> Report:
    return diff(*diverging)


def test_the_first_depth_row_and_phase_are_named(report: Report) -> None:
    found = report.divergence
    assert found is not None
    request = prompts()[0]
    position = 3 * len(request) // 4
    assert (found.depth, found.phase) == (FIRST, "verify")
    assert (found.request, found.position, found.token) == ("s0", position, request[position])
    assert found.error == pytest.approx(1e-3, rel=0.1)


def test_its_error_is_followed_over_all_depths(report: Report) -> None:
    found = report.divergence
    assert found is not None
    curve = {point.depth: point.error for point in found.curve}
    assert list(curve) == [*range(L + 1), "final"]
    for depth in range(FIRST):
        assert curve[depth] < 1e-5
    for depth in range(FIRST + 1, L + 1):
        assert curve[depth] == pytest.approx(2 * curve[depth - 1], rel=0.1)


def test_only_the_phase_that_differs_is_bad(report: Report) -> None:
    for line in report.layers:
        bad = {p.phase for p in line.phases if p.state is not State.OK}
        wrong = isinstance(line.depth, int) and line.depth >= FIRST
        assert bad == ({"verify"} if wrong else set())


def test_nothing_diverges_between_faithful_computations(tmp_path: Path) -> None:
    faithful = diff(write_train(tmp_path / "t.h5", every=True), write_infer(tmp_path / "i.h5"))
    assert faithful.divergence is None


def test_where_all_rows_are_a_little_off_the_first_of_them_is_named(tmp_path: Path) -> None:
    def spoil(name: str, x: Floats) -> Floats:
        # Five times the noise: more than a median may have, less than a row may.
        return x * np.float32(1 + 5 * 12 * 2**-23 * 2.45) if name == "layer/005" else x

    found = diff(write_train(tmp_path / "t.h5", every=True, spoil=spoil), write_infer(tmp_path / "i.h5"))
    assert found.divergence is not None
    assert (found.divergence.depth, found.divergence.position) == (5, 0)
    assert all(line.over == 0 for line in found.layers)


def test_json_has_the_first_divergence(
    diverging: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", *map(str, diverging), "--format", "json"]) == 1
    found = json.loads(capsys.readouterr().out)["divergence"]
    assert (found["depth"], found["phase"], found["request"]) == (FIRST, "verify", "s0")
    assert len(found["curve"]) == L + 2


class TestStrip:
    def test_a_row_for_each_phase_and_a_mark_for_each_depth(
        self,
        diverging: tuple[Path, Path],
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setenv("COLUMNS", "80")
        main(["diff", *map(str, diverging)])
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= 80
        marks = {
            line.split()[0]: line.split()[1:]
            for line in lines
            if line.startswith(("prefill ", "decode ", "verify ")) and "·" in line
        }
        assert marks["prefill"] == marks["decode"] == ["·"] * (L + 2)
        assert marks["verify"][:FIRST] == ["·"] * FIRST
        assert "·" not in marks["verify"][FIRST : L + 1]
        assert any(
            line.startswith("first at depth 5 (output of layer 4): verify, request s0") for line in lines
        )

    @pytest.mark.parametrize("depths", [3, 30, 61, 200])
    @pytest.mark.parametrize("width", [40, 80])
    def test_any_number_of_depths_fits(self, depths: int, width: int) -> None:
        text = _printed(Strip([_line(d, 1.0 if 2 * d < depths else 1e3) for d in range(depths)]), width)
        assert max(map(len, text.splitlines())) <= width
        (row,) = (line for line in text.splitlines() if line.startswith("prefill"))
        assert row.split()[1][0] == "·"
        assert row.rstrip().endswith("▇")

    def test_the_worst_of_depths_that_share_a_column_is_shown(self) -> None:
        text = _printed(Strip([_line(d, 1e3 if d == 101 else 1.0) for d in range(200)]), 80)
        assert text.count("▇") == 2  # one in the strip, one in the legend
        assert "4 depths a column" in text

    def test_an_encoding_without_bars_gets_digits(self) -> None:
        text = _printed(Strip([_line(0, 1.0), _line(1, 20.0)]), 80, "ascii")
        assert text.isascii()
        assert "prefill       . 3" in text

    @pytest.mark.parametrize(("times", "expected"), [(0.5, 0), (1, 0), (2, 1), (5, 2), (20, 3), (1e9, 8)])
    def test_a_step_is_half_a_power_of_ten(self, times: float, expected: int) -> None:
        assert level(_line(0, times).phases[0]) == expected


def _line(depth: int, times: float) -> LayerLine:
    """A depth that would pass at so many times its noise."""
    noise = 1e-6
    phase = PhaseLine("prefill", 9, 0.0, 0, State.OK, noise=noise, passes_at=times * noise)
    return LayerLine(depth, 0.0, noise, 9, 0, times <= 1, phases=[phase])


def _printed(strip: Strip, width: int, encoding: str = "utf-8") -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    Console(file=stream, width=width, color_system=None).print(strip)
    stream.seek(0)
    return stream.read()
