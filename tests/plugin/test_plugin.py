"""The pytest plugin as a user has it: in a project of its own, found by its entry point."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hsprobe.fixtures import cpu
from hsprobe.fixtures.demo import TRAINED
from tests.synthetic import World, prompts, write_infer, write_train

pytest_plugins = ["pytester"]

PROJECT = """
    from hsprobe.testing import assert_draft_sees, assert_layers, assert_traces_match

    def test_traces():
        assert_traces_match("train.h5", "infer.h5")

    def test_draft():
        assert_draft_sees("train.h5", "infer.h5")

    def test_layers():
        assert_layers("infer.h5", [2, 5, 7])
"""


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    write_train(pytester.path / "train.h5", (3, 6, 8))
    return pytester


def _errors(result: pytest.RunResult) -> list[str]:
    """The lines of the output that say what is wrong."""
    return [line.removeprefix("E   ").strip() for line in result.outlines if line.startswith("E   ")]


def test_the_right_wiring_passes(project: pytest.Pytester) -> None:
    write_infer(project.path / "infer.h5", (3, 6, 8))
    project.makepyfile(PROJECT)
    project.runpytest_subprocess().assert_outcomes(passed=3)
    assert not (project.path / "hsprobe-reports").exists()


def test_the_broken_one_fails_with_the_finding_first(project: pytest.Pytester) -> None:
    write_infer(project.path / "infer.h5", (0, 6, 8))
    project.makepyfile(PROJECT)
    result = project.runpytest_subprocess()
    result.assert_outcomes(failed=3)
    lines = _errors(result)
    assert "the traces differ" in lines[0]
    assert "FAIL  aux chunk 0 carries the embedding output (depth 0)" in lines[1]
    assert any("[-1, 5, 7]  ->  [2, 5, 7]" in line for line in lines[:4])
    assert any("depths 0, 6, 8; ids [2, 5, 7] mean depths 3, 6, 8" in line for line in lines)
    assert not any("hsprobe/testing.py" in line for line in result.outlines)


def test_the_report_of_a_failure_is_a_file_that_the_output_names(project: pytest.Pytester) -> None:
    write_infer(project.path / "infer.h5", (0, 6, 8))
    project.makepyfile(test_it=PROJECT)
    result = project.runpytest_subprocess("--hsprobe-reports=out", "--junitxml=junit.xml", "-k", "not draft")
    report = project.path / "out" / "test_it.py-test_traces.json"
    assert json.loads(report.read_text())["findings"][0]["code"] == "HS102"
    assert "carries the embedding output" in (project.path / "out/test_it.py-test_layers.txt").read_text()
    result.stdout.fnmatch_lines(["*hsprobe report*", str(report)])
    assert str(report) in (project.path / "junit.xml").read_text()


BASELINE = """
    def test_states(hsprobe_baseline):
        hsprobe_baseline("infer.h5")
"""


def test_a_baseline_is_accepted_once_and_then_holds(project: pytest.Pytester) -> None:
    project.makepyfile(test_it=BASELINE)
    infer = project.path / "infer.h5"
    write_infer(infer, (3, 6, 8))
    missing = project.runpytest_subprocess()
    missing.assert_outcomes(failed=1)
    assert "There is no baseline" in missing.stdout.str()
    assert "--hsprobe-update" in missing.stdout.str()
    project.runpytest_subprocess("--hsprobe-update").assert_outcomes(passed=1)
    (baseline,) = (project.path / "hsprobe_baselines").iterdir()
    assert baseline.stat().st_size < 100_000
    project.runpytest_subprocess().assert_outcomes(passed=1)
    write_infer(infer, (2, 6, 8), jitter=2e-7)
    broken = project.runpytest_subprocess()
    broken.assert_outcomes(failed=1)
    first = _errors(broken)[0]
    assert "aux chunk 0 differs from the baseline; its states are now in depth 3 (output of layer 2)" in first
    assert not any("aux chunk 1 differs" in line for line in _errors(broken))
    # Accepting what there is now makes it the baseline.
    project.runpytest_subprocess("--hsprobe-update").assert_outcomes(passed=1)
    project.runpytest_subprocess().assert_outcomes(passed=1)


def test_a_capture_of_other_prompts_is_trouble_and_no_failure_of_the_states(project: pytest.Pytester) -> None:
    project.makepyfile(test_it=BASELINE)
    write_infer(project.path / "infer.h5", (3, 6, 8))
    project.runpytest_subprocess("--hsprobe-update")
    write_infer(project.path / "infer.h5", (3, 6, 8), world=World(requests=prompts(seed=9)))
    result = project.runpytest_subprocess()
    result.assert_outcomes(failed=1)
    assert any("HsprobeError: No row of infer.h5 has the token ids" in line for line in _errors(result))


def test_a_server_without_arguments_is_a_clear_error(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_it(hsprobe_server): pass")
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(errors=1)
    assert "set hsprobe_server_args" in result.stdout.str()


def test_loading_the_plugin_is_light() -> None:
    heavy = "('torch', 'h5py', 'numpy', 'sglang', 'rich')"
    code = f"import sys, pytest, hsprobe.pytest_plugin; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


SERVED = """
    import pytest
    from hsprobe.testing import assert_draft_sees, assert_layers

    def test_draft_sees_what_it_was_trained_on(hsprobe_server):
        assert_draft_sees("train.h5", hsprobe_server)

    def test_the_same_server_is_kept(hsprobe_server, hsprobe_capture, hsprobe_baseline):
        trace = hsprobe_capture("train.h5", max_new_tokens=4)
        assert_layers(trace, [2, 5, 8])
        hsprobe_baseline(trace)
        assert hsprobe_server.arguments[0] == "--model-path=target"
"""


def test_a_real_server_through_the_fixtures(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = pytester.path
    (folder / "target").symlink_to(TRAINED / "target")
    lines = (TRAINED / "prompts.jsonl").read_text().splitlines(keepends=True)
    (folder / "prompts.jsonl").write_text("".join(lines[:2]))
    command = "-m hsprobe capture --model target --layers 2,5,8 --dtype float32 --max-new-tokens 8"
    done = subprocess.run(
        [sys.executable, *command.split(), "--prompts", "prompts.jsonl", "-o", "train.h5"],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    arguments = [*cpu.SERVER_ARGUMENTS, *cpu.speculative_arguments(TRAINED / "draft", 3)]
    pytester.makeini(f"[pytest]\nhsprobe_server_args = --model-path=target {' '.join(arguments)}\n")
    pytester.makepyfile(test_served=SERVED)
    for name, value in cpu.environment().items():
        monkeypatch.setenv(name, value)
    result = pytester.runpytest_subprocess("--hsprobe-update", timeout=500)
    result.assert_outcomes(passed=2)
    assert Path(folder / "hsprobe_baselines").is_dir()
