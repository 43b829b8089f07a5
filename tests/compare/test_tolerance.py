"""Measured noise: what is learned, what it changes, and files that nobody vouches for."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsprobe.cli import main
from hsprobe.compare import tolerance
from hsprobe.compare.noise import MEDIAN_ALLOWANCE, ROW_ALLOWANCE, Noise, needed
from hsprobe.compare.statistics import ErrorStats
from hsprobe.compare.tolerance import Figure, Tolerance
from hsprobe.diagnose import diff
from hsprobe.diagnose.learn import learn
from hsprobe.errors import HsprobeError
from hsprobe.trace.schema import Phase
from tests.synthetic import Floats, L, World, write_infer, write_train

Facts = dict[str, Any]


def _figure(**changes: Any) -> Figure:
    quantiles = {"median": 1e-3, "q90": 2e-3, "q99": 3e-3, "q995": 4e-3, "q999": 5e-3, "largest": 1.0}
    known: Facts = {"depth": 3, "phase": 0, "dtypes": ("float32", "float32"), "rows": 100}
    return Figure(**(known | quantiles | changes))


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A whole model's reference and a capture that differs by 1e-3 a value, far above the model's noise."""
    reference = write_train(tmp_path / "reference.h5", every=True)
    return reference, write_infer(tmp_path / "good.h5", jitter=1e-3)


@pytest.fixture
def learned(pair: tuple[Path, Path], tmp_path: Path) -> Path:
    tolerance.write(learn(*pair).tolerance, tmp_path / "tolerance.json")
    return tmp_path / "tolerance.json"


class TestLearning:
    def test_every_depth_and_phase_is_measured(self, pair: tuple[Path, Path]) -> None:
        found = learn(*pair).tolerance
        depths = {(f.depth, f.phase) for f in found.figures}
        phases = (Phase.PREFILL, Phase.DECODE, Phase.VERIFY)
        assert depths == {(d, p) for d in [*range(L + 1), "final"] for p in phases}
        assert {f.dtypes for f in found.figures} == {("float32", "float32")}
        for figure in found.figures:
            assert figure.median == pytest.approx(0.0 if figure.depth == 0 else 1e-3, rel=0.3)
        assert sum(f.rows for f in found.figures if f.depth == 3) == 162

    def test_both_captures_are_named(self, pair: tuple[Path, Path]) -> None:
        sides = learn(*pair).tolerance.sides
        assert [side["path"] for side in sides] == [str(path) for path in pair]
        assert [side["producer"] for side in sides] == ["transformers 5.0", "sglang 0.5.23"]
        assert {side["num_layers"] for side in sides} == {L}

    def test_chunks_alone_are_measured_at_their_depths(self, tmp_path: Path) -> None:
        infer = write_infer(tmp_path / "i.h5", sites=("aux",), jitter=1e-3)
        found = learn(write_train(tmp_path / "t.h5"), infer).tolerance
        assert {f.depth for f in found.figures} == {3, 6, 9}

    def test_a_sink_row_and_a_loud_channel_do_not_widen_it(self, tmp_path: Path) -> None:
        def figures(**world: Any) -> list[Figure]:
            made = World(**world)
            reference = write_train(tmp_path / "t.h5", every=True, world=made)
            return learn(reference, write_infer(tmp_path / "i.h5", world=made, jitter=1e-3)).tolerance.figures

        for quiet, loud in zip(figures(), figures(sink=True, loud=True), strict=True):
            assert loud.expected(3.0) == pytest.approx(quiet.expected(3.0), rel=0.3)

    def test_another_layer_is_not_learned_as_noise(self, tmp_path: Path) -> None:
        def other(name: str, x: Floats) -> Floats:
            return np.roll(x, 1, axis=0)

        reference = write_train(tmp_path / "t.h5", every=True, spoil=other)
        with pytest.raises(HsprobeError, match="not two benign captures"):
            learn(reference, write_infer(tmp_path / "i.h5"))

    def test_figures_far_above_the_model_are_remarked_on(self, pair: tuple[Path, Path]) -> None:
        assert any("times what the model expects" in note for note in learn(*pair).notes)

    def test_phases_with_few_rows_are_left_to_the_model(self, tmp_path: Path) -> None:
        reference = write_train(tmp_path / "t.h5", every=True)
        found = learn(reference, write_infer(tmp_path / "i.h5", keep=12))
        assert {f.phase for f in found.tolerance.figures} == {Phase.PREFILL}
        assert any("Phase verify has only" in note for note in found.notes)


class TestUse:
    def test_a_file_replaces_the_model_and_both_are_named(
        self, pair: tuple[Path, Path], learned: Path, tmp_path: Path
    ) -> None:
        train = write_train(tmp_path / "t.h5")
        by_model, by_file = diff(train, pair[1]), diff(train, pair[1], noise=learned)
        assert not by_model.same
        assert by_file.same, by_file.findings
        assert {line.noise_from for line in by_model.chunks} == {"model"}
        assert {p.noise_from for line in by_file.chunks for p in line.phases} == {"file"}

    def test_a_fault_above_measured_noise_is_still_found(self, learned: Path, tmp_path: Path) -> None:
        train = write_train(tmp_path / "t.h5")
        noisy = write_infer(tmp_path / "bad.h5", jitter=2e-2)
        assert not diff(train, noisy, noise=learned).same
        shifted = write_infer(tmp_path / "shifted.h5", depths=(2, 5, 8), jitter=1e-3)
        assert [f.name for f in diff(train, shifted, noise=learned).findings] == ["LAYER_SHIFT"]

    def test_what_would_just_pass_just_passes(self, tmp_path: Path) -> None:
        train = write_train(tmp_path / "t.h5")
        infer = write_infer(tmp_path / "i.h5", jitter=1e-3)
        for line in diff(train, infer).chunks:
            for p in line.phases:
                assert p.passes_at is not None
                assert p.noise < p.passes_at < 1e-2
        rows = ErrorStats()
        rows.add(np.full(1000, 0.03, np.float32), 1.0)
        assert needed(rows) == pytest.approx(0.03 / MEDIAN_ALLOWANCE, rel=0.04)
        rows = ErrorStats()
        rows.add(np.where(np.arange(1000) < 100, 0.5, 0.0).astype(np.float32), 1.0)
        assert needed(rows) == pytest.approx(0.5 / ROW_ALLOWANCE, rel=0.04)

    def test_no_tolerance_makes_another_depth_right(self, tmp_path: Path) -> None:
        train = write_train(tmp_path / "t.h5")
        report = diff(train, write_infer(tmp_path / "i.h5", depths=(2, 5, 8)))
        assert [line.passes_at for line in report.chunks] == [None] * 3

    def test_phases_and_pairs_that_were_not_measured_get_the_model(self) -> None:
        known = Noise(8, Tolerance([_figure()], [{}, {}]))
        model = Noise(8)
        pair = ("float32", "float32")
        assert known.level(3, pair, 0).source == "file"
        assert known.level(3, pair, 1) == model.level(3, pair, 1)
        assert known.level(4, pair, 0) == model.level(4, pair, 0)
        assert known.level(3, ("bfloat16", "float32"), 0).source == "model"

    def test_the_order_of_the_dtypes_does_not_matter(self) -> None:
        known = Noise(8, Tolerance([_figure(dtypes=("bfloat16", "float32"))], [{}, {}]))
        assert known.level(3, ("float32", "torch.bfloat16"), 0).source == "file"

    def test_safety_scales_what_is_expected(self) -> None:
        assert _figure().expected(6.0) == pytest.approx(2 * _figure().expected(3.0))
        assert _figure(median=0, q90=0, q99=0, q995=0, q999=0).expected(3.0) > 0

    def test_a_file_of_another_model_is_refused(self, learned: Path, tmp_path: Path) -> None:
        world = World(width=32)
        train, infer = (
            write_train(tmp_path / "t.h5", world=world),
            write_infer(tmp_path / "i.h5", world=world),
        )
        with pytest.raises(HsprobeError, match="another model: its hidden_size is 64"):
            diff(train, infer, noise=learned)


def _set(*path: str | int, to: Any) -> Callable[[Facts], Any]:
    def change(facts: Facts) -> Any:
        place: Any = facts
        for part in path[:-1]:
            place = place[part]
        place[path[-1]] = to
        return facts

    return change


class TestForeignFiles:
    def test_what_is_written_is_read(self, learned: Path, pair: tuple[Path, Path]) -> None:
        assert tolerance.read(learned).figures == learn(*pair).tolerance.figures

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            (lambda facts: [facts], "not a tolerance file"),
            (_set("format", to="other"), "not a tolerance file"),
            (_set("schema_version", to=2), "newer than 1"),
            (_set("schema_version", to="1"), "schema version is not known"),
            (_set("schema_version", to=True), "schema version is not known"),
            (_set("safety", to=0.5), "safety factor"),
            (_set("safety", to=True), "safety factor"),
            (_set("safety", to=10**400), "safety factor"),
            (_set("sides", to=[{}]), "which two captures"),
            (_set("figures", to=[]), "no list of figures"),
            (_set("figures", 0, to=3), "figure 0 is not an object"),
            (_set("figures", 0, "depth", to=-1), "figure 0 names no depth"),
            (_set("figures", 0, "depth", to=[]), "figure 0 names no depth"),
            (_set("figures", 0, "phase", to="sleep"), "figure 0 names no phase"),
            (_set("figures", 0, "dtypes", to=["float32", "pickle"]), "figure 0 does not name two dtypes"),
            (_set("figures", 0, "dtypes", to=[["float32"], "float32"]), "does not name two dtypes"),
            (_set("figures", 0, "rows", to=0), "figure 0 has no number of rows"),
            (_set("figures", 0, "median", to=-1e-9), "quantiles of figure 0"),
            (_set("figures", 0, "median", to="1"), "quantiles of figure 0"),
            (_set("figures", 0, "median", to=1.9), "quantiles of figure 0"),
            (_set("figures", 0, "largest", to=1e308), "quantiles of figure 0"),
            (lambda facts: facts | {"figures": facts["figures"] + facts["figures"][:1]}, "the same depth"),
        ],
    )
    def test_figures_that_cannot_be_are_refused(
        self, learned: Path, change: Callable[[Facts], Any], says: str
    ) -> None:
        learned.write_text(json.dumps(change(json.loads(learned.read_text()))))
        with pytest.raises(HsprobeError, match=says):
            tolerance.read(learned)

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b"\x89HDF\r\n\x1a\n",
            b"\xff\xfe\x00",
            b"[" * 100_000,
            b'{"safety": NaN}',
            b'{"safety": Infinity}',
        ],
    )
    def test_what_is_not_json_is_one_sentence_and_exit_code_2(
        self, content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "t.json"
        path.write_bytes(content)
        assert main(["diff", "--noise", str(path), "a.h5", "b.h5"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert str(path) in line
        assert "not JSON" in line

    def test_missing_folders_and_huge_files_are_told(self, tmp_path: Path) -> None:
        with pytest.raises(HsprobeError, match="cannot be read"):
            tolerance.read(tmp_path / "none.json")
        with pytest.raises(HsprobeError, match="cannot be read"):
            tolerance.read(tmp_path)
        with (tmp_path / "huge.json").open("wb") as file:
            file.truncate(1 << 30)
        with pytest.raises(HsprobeError, match="larger than 16 MiB"):
            tolerance.read(tmp_path / "huge.json")


class TestCommand:
    def test_noise_writes_a_file_and_shows_it_beside_the_model(
        self, pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = tmp_path / "tolerance.json"
        assert main(["noise", *map(str, pair), "-o", str(out), "--safety", "4"]) == 0
        shown = capsys.readouterr().out
        assert "row errors between float32 and float32" in shown
        assert max(map(len, shown.splitlines())) <= 80
        assert tolerance.read(out).safety == 4.0
        figure = next(f for f in tolerance.read(out).figures if f.depth == 3 and f.phase == Phase.VERIFY)
        assert f"{figure.median:.1e}" in shown
        assert f"{figure.expected(4.0):.1e}" in shown

    @pytest.mark.parametrize("safety", ["0", "nan", "inf", "x"])
    def test_a_safety_factor_below_one_is_refused(self, safety: str) -> None:
        with pytest.raises(SystemExit) as exit:
            main(["noise", "a.h5", "b.h5", "-o", "t.json", "--safety", safety])
        assert exit.value.code == 2

    def test_the_report_says_where_its_noise_is_from(
        self, pair: tuple[Path, Path], learned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        train = write_train(tmp_path / "t.h5")
        assert main(["diff", str(train), str(pair[1]), "--noise", str(learned)]) == 0
        assert "(measured; " in capsys.readouterr().out
        assert main(["diff", str(train), str(pair[1])]) == 1
        text = capsys.readouterr().out
        assert "noise from" in text
        assert main(["diff", str(train), str(pair[1]), "--format", "json", "--noise", str(learned)]) == 0
        (line, *_) = json.loads(capsys.readouterr().out)["chunks"]
        assert line["noise_from"] == "file"
        assert 0 < line["passes_at"] <= line["noise"]
        assert math.isfinite(line["passes_at"])
