"""A capture against itself."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hsprobe.cli import main
from hsprobe.compare import tolerance
from hsprobe.diagnose.consistency import ACCOUNT, HANDOVER, REPEAT, SelfReport, consistency
from hsprobe.diagnose.learn import learn
from hsprobe.errors import HsprobeError
from hsprobe.trace.schema import Phase
from tests.synthetic import Floats, World, prompts, write_infer, write_train

# A prompt, and again with its answer and more appended: prefill repeats what decode and verify computed.
TWICE = [request for r in prompts(2) for request in (r, [*r, *range(40)])]


def _write(path: Path, **options: object) -> Path:
    return write_infer(path, world=World(requests=TWICE), **options)  # type: ignore[arg-type]


def _codes(report: SelfReport) -> list[str]:
    return [finding.code for finding in report.findings]


def _off(where: str) -> object:
    """1 % more, in passes whose mark holds the word."""

    def spoil(name: str, x: Floats) -> Floats:
        return x * np.float32(1.01) if where in name else x

    return spoil


class TestAgreement:
    def test_phases_passes_the_handover_and_the_account_are_compared(self, tmp_path: Path) -> None:
        report = consistency(_write(tmp_path / "i.h5"))
        assert report.same
        assert {c.title for c in report.comparisons} >= {
            "decode vs prefill",
            "verify vs prefill",
            "prefill vs itself",
            "draft.input vs aux",
            "aux vs layer",
        }
        assert report.repeated == sum(map(len, prompts(2)))
        assert report.rows == sum(map(len, TWICE))
        assert report.notes == []

    def test_every_site_with_such_rows_is_compared(self, tmp_path: Path) -> None:
        report = consistency(_write(tmp_path / "i.h5"))
        (found,) = (c for c in report.comparisons if c.title == "decode vs prefill")
        sites = {site.site for site in found.sites}
        assert sites >= {"aux chunk 0", "aux chunk 2", "layer/000", "layer/009", "logits_processor.input"}

    def test_a_loud_channel_and_a_sink_row_raise_no_alarm(self, tmp_path: Path) -> None:
        world = World(requests=TWICE, loud=True, sink=True)
        assert consistency(write_infer(tmp_path / "i.h5", world=world)).same

    def test_without_repeats_only_the_handover_is_compared_and_this_is_said(self, tmp_path: Path) -> None:
        report = consistency(write_infer(tmp_path / "i.h5"))
        assert report.same
        assert {c.kind for c in report.comparisons} == {HANDOVER, ACCOUNT}
        (note,) = report.notes
        assert "No token was computed twice" in note
        assert "--disable-radix-cache" in note

    def test_nothing_to_compare_is_trouble(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = write_infer(tmp_path / "i.h5", sites=("aux",))
        with pytest.raises(HsprobeError, match="cannot be compared with itself"):
            consistency(path)
        assert main(["diff", str(path)]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


class TestFaults:
    def test_one_phase_of_the_stream_differs(self, tmp_path: Path) -> None:
        def spoil(name: str, x: Floats) -> Floats:
            deep = name.startswith("layer/") and int(name[6:9]) >= 4
            return x * np.float32(1.01) if deep and name.endswith("@verify") else x

        report = consistency(_write(tmp_path / "i.h5", spoil=spoil))
        (finding,) = (f for f in report.findings if f.code == "HS506")
        assert finding.title.startswith("verify gives other states than prefill")
        (found,) = (c for c in report.comparisons if c.title == "verify vs prefill")
        assert found.divergence is not None
        assert (found.divergence.depth, found.divergence.phase) == (4, "verify")
        assert {s.site for s in found.bad} == {f"layer/{d:03d}" for d in range(4, 10)}

    def test_one_phase_hands_over_other_states_than_it_computes(self, tmp_path: Path) -> None:
        report = consistency(_write(tmp_path / "i.h5", spoil=_off("aux@decode")))
        (finding,) = (f for f in report.findings if f.code == "HS304")
        assert "decode" in finding.title

    def test_the_draft_is_handed_something_else(self, tmp_path: Path) -> None:
        report = consistency(_write(tmp_path / "i.h5", spoil=_off("draft.input")))
        assert "HS601" in _codes(report)

    def test_aux_is_not_what_the_server_says(self, tmp_path: Path) -> None:
        lies = {"aux": {"depths": [2, 6, 9]}}
        report = consistency(write_infer(tmp_path / "i.h5", provenance=lies))
        assert _codes(report) == ["HS102"]

    def test_one_row_in_a_pass_is_found_and_named(self, tmp_path: Path) -> None:
        def spoil(name: str, x: Floats) -> Floats:
            if name == "layer/005@prefill" and len(x) > 20:
                x[3:6] *= 2
            return x

        report = consistency(_write(tmp_path / "i.h5", spoil=spoil))
        found = next(c for c in report.comparisons if c.kind == REPEAT and c.bad)
        assert found.divergence is not None
        assert found.divergence.depth == 5
        assert found.divergence.position == 3

    def test_measured_noise_is_used(self, tmp_path: Path) -> None:
        noisy = _write(tmp_path / "i.h5", jitter=1e-3)
        assert not consistency(noisy).same
        reference = write_train(tmp_path / "t.h5", every=True, world=World(requests=TWICE))
        tolerance.write(learn(reference, noisy).tolerance, tmp_path / "t.json")
        report = consistency(noisy, noise=tmp_path / "t.json")
        assert [c.title for c in report.comparisons if c.kind == REPEAT and c.bad] == []


class TestGraphs:
    """A request served eagerly, and again with its decode and verify passes replayed from CUDA graphs."""

    AGAIN = World(requests=[prompts(1)[0], prompts(1)[0]])
    GRAPHS = ((1, Phase.DECODE), (1, Phase.VERIFY))

    def _served(self, path: Path, spoil: object = None) -> Path:
        return write_infer(path, world=self.AGAIN, graphs=self.GRAPHS, spoil=spoil)  # type: ignore[arg-type]

    def test_eager_and_graph_passes_of_one_phase_are_compared(self, tmp_path: Path) -> None:
        report = consistency(self._served(tmp_path / "i.h5"))
        assert report.same
        titles = {c.title for c in report.comparisons if c.kind == REPEAT}
        assert titles >= {"decode (graph) vs decode (eager)", "verify (graph) vs verify (eager)"}

    def test_states_that_only_a_graph_computes_wrongly_are_named_by_it(self, tmp_path: Path) -> None:
        report = consistency(self._served(tmp_path / "i.h5", _off("layer/006@verify graph")))
        (finding,) = (f for f in report.findings if f.code == "HS506")
        assert finding.title.startswith("verify (graph) gives other states than verify (eager)")

    def test_a_graph_that_hands_over_other_states_than_it_computes(self, tmp_path: Path) -> None:
        report = consistency(self._served(tmp_path / "i.h5", _off("aux@decode graph")))
        (finding,) = (f for f in report.findings if f.code == "HS304")
        assert "decode (graph)" in finding.title
        assert any("--disable-cuda-graph" in step for step in finding.mend.steps)


class TestCommand:
    def test_the_report_fits_80_columns_and_a_pipe_gets_no_colour(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", "80")
        assert main(["diff", str(_write(tmp_path / "i.h5"))]) == 0
        good = capsys.readouterr().out
        assert good.startswith("OK    the capture agrees with itself\n")
        assert main(["diff", str(_write(tmp_path / "bad.h5", spoil=_off("layer/004@verify")))]) == 1
        bad = capsys.readouterr().out
        assert "HS506 INCONSISTENT" in bad
        for text in (good, bad):
            assert max(map(len, text.splitlines())) <= 80
            assert "\x1b" not in text
            assert "…" not in text

    def test_options_may_stand_anywhere(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        infer, train = _write(tmp_path / "i.h5"), write_train(tmp_path / "t.h5", world=World(requests=TWICE))
        assert main(["diff", str(train), "--format", "json", str(infer)]) == 0
        assert json.loads(capsys.readouterr().out)["train"]["path"] == str(train)
        assert main(["diff", "--format", "json", str(infer)]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert facts["verdict"] == "same"
        assert facts["infer"]["path"] == str(infer)
        assert facts["repeated_contexts"] == sum(map(len, prompts(2)))
        assert main(["diff", str(infer), "--format", "json"]) == 0
