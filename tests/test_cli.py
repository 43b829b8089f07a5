"""The command line as a user meets it: a process, its output and its exit code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hsprobe.trace.writer import TraceWriter
from tests.synthetic import Floats, World, write_infer, write_train


def _run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hsprobe.cli", *map(str, arguments)]
    environment = {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "NO_COLOR", "COLUMNS")}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    write_train(folder / "train.h5", (3, 6, 8))
    write_infer(folder / "good.h5", (3, 6, 8))
    write_infer(folder / "embed.h5", (0, 3, 6))
    return folder


def _is_one_sentence_of_trouble(done: subprocess.CompletedProcess[str]) -> bool:
    return done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1


def test_same_is_zero(folder: Path) -> None:
    done = _run("diff", folder / "train.h5", folder / "good.h5")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 3


def test_different_is_one(folder: Path) -> None:
    done = _run("diff", folder / "train.h5", folder / "embed.h5")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("FAIL  aux chunk 0 carries the embedding output (depth 0)")
    assert "\x1b" not in done.stdout


def test_json_goes_to_a_file_and_the_exit_code_stays(folder: Path) -> None:
    done = _run("diff", folder / "train.h5", folder / "embed.h5", "--format", "json", "-o", folder / "r.json")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
    assert json.loads((folder / "r.json").read_text())["verdict"] == "different"


def test_nan_is_a_finding(folder: Path) -> None:
    def holes(name: str, x: Floats) -> Floats:
        if name.startswith("aux"):
            x[0, 0] = float("nan")
        return x

    done = _run("diff", folder / "train.h5", write_infer(folder / "nan.h5", (3, 6, 8), spoil=holes))
    assert done.returncode == 1
    assert "hold NaN or Inf" in done.stdout


def test_a_missing_file(folder: Path) -> None:
    done = _run("diff", folder / "train.h5", folder / "none.h5")
    assert _is_one_sentence_of_trouble(done)
    assert "none.h5" in done.stderr


def test_a_text_file(folder: Path) -> None:
    (folder / "text.h5").write_text("not a trace\n" * 100)
    done = _run("diff", folder / "text.h5", folder / "good.h5")
    assert _is_one_sentence_of_trouble(done)
    assert "text.h5" in done.stderr


@pytest.mark.parametrize("share", [0.3, 0.9])
def test_a_truncated_trace(folder: Path, share: float) -> None:
    whole = (folder / "good.h5").read_bytes()
    (folder / "cut.h5").write_bytes(whole[: int(share * len(whole))])
    for done in (_run("diff", folder / "train.h5", folder / "cut.h5"), _run("inspect", folder / "cut.h5")):
        assert _is_one_sentence_of_trouble(done)
        assert "cut.h5" in done.stderr


def test_a_trace_of_another_model(folder: Path) -> None:
    write_infer(folder / "other.h5", (3, 6, 8), world=World(width=32))
    done = _run("diff", folder / "train.h5", folder / "other.h5")
    assert _is_one_sentence_of_trouble(done)
    assert "different models" in done.stderr


def test_an_empty_capture(folder: Path) -> None:
    with TraceWriter(folder / "empty.h5", {"producer": "sglang"}) as writer:
        writer.add_rank(0, {})
    done = _run("diff", folder / "train.h5", folder / "empty.h5")
    assert _is_one_sentence_of_trouble(done)
    assert "nothing was captured" in done.stderr
    assert _run("inspect", folder / "empty.h5").returncode == 0


def test_a_report_that_cannot_be_written(folder: Path) -> None:
    done = _run("diff", folder / "train.h5", folder / "good.h5", "-o", folder / "no" / "where.txt")
    assert _is_one_sentence_of_trouble(done)
    assert "cannot be written" in done.stderr


def test_wrong_usage_is_trouble_and_not_a_difference(folder: Path) -> None:
    assert _run("diff", folder / "train.h5").returncode == 2
    assert _run("diff", folder / "train.h5", folder / "good.h5", "--rows", "0").returncode == 2
    assert _run().returncode == 2


def test_inspect_as_json(folder: Path) -> None:
    done = _run("inspect", folder / "good.h5", "--format", "json")
    assert done.returncode == 0
    found = json.loads(done.stdout)
    assert found["provenance"]["producer"] == "sglang"
    assert {tensor["name"] for tensor in found["tensors"]} >= {"aux", "draft.input", "layer/000"}


@pytest.mark.parametrize("command", [[], ["diff"], ["inspect"], ["capture"], ["run"]])
def test_help_is_complete_and_has_examples(command: list[str]) -> None:
    done = _run(*command, "--help")
    assert done.returncode == 0
    assert "examples:" in done.stdout
    assert f"hsprobe {command[0] if command else 'diff'} " in done.stdout


def test_nothing_heavy_is_imported_before_a_command_runs() -> None:
    code = (
        "import sys, hsprobe.cli; hsprobe.cli.build_parser();"
        "print([m for m in ('torch', 'h5py', 'numpy', 'rich', 'sglang', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_fault_of_hsprobe_itself_is_trouble(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from hsprobe import cli
    from hsprobe.commands import inspect

    def broken(args: object) -> int:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(inspect, "run", broken)
    assert cli.main(["inspect", "x.h5"]) == 2
    assert "no such luck" in capsys.readouterr().err


def test_an_interrupt_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    from hsprobe import cli
    from hsprobe.commands import inspect

    def interrupted(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(inspect, "run", interrupted)
    assert cli.main(["inspect", "x.h5"]) == 130
