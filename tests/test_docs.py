"""Every command in docs/low-acceptance.md and docs/ci.md runs; those that start a server are the README's."""

import configparser
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml

from hsprobe.fixtures.demo import TRAINED

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
CI = (ROOT / "docs/ci.md").read_text()
LOW = (ROOT / "docs/low-acceptance.md").read_text()
CASES = (ROOT / "docs/case-studies.md").read_text()


def _commands(text: str) -> list[str]:
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    return [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]


def _block(text: str, language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    return str(found)


def _needs_a_server(command: str) -> bool:
    """Those run, on the real server, with the README's; here they only have to be the same."""
    if not command.startswith("hsprobe capture --server"):
        return False
    assert command in _commands(README), "a command that no test runs"
    return True


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the pages' names stand for. The capture is of the right wiring."""
    for name, source in (("train.h5", "train.h5"), ("infer.h5", "right.h5"), ("good.h5", "right.h5")):
        shutil.copy(str(files("hsprobe.data") / source), tmp_path / name)
    (tmp_path / "TARGET").symlink_to(TRAINED / "target")
    (tmp_path / "DRAFT").symlink_to(TRAINED / "draft")
    # The captured requests: prompt and answer.
    from hsprobe.trace.reader import Trace

    with Trace.open(tmp_path / "infer.h5") as trace:
        ids = [trace.requests.tokens(r).tolist() for r in range(len(trace.requests))]
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"input_ids": {line}}}\n' for line in ids))
    return tmp_path


def _run(command: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-e", "-c", command],
        cwd=folder,
        env={**os.environ, "PATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_low_acceptance_leads_to_commands_that_run(folder: Path) -> None:
    ran = 0
    for command in _commands(LOW):
        if _needs_a_server(command):
            continue
        expected = 1 if "broken.h5" in command else 0
        done = _run(command, folder)
        assert done.returncode == expected, f"$ {command}\n{done.stdout}{done.stderr}"
        ran += 1
    assert ran >= 8
    assert (folder / "report.html").is_file()


def test_case_studies_name_faults_and_pages_that_are_there() -> None:
    known = (ROOT / "docs/faults.md").read_text()
    codes = set(re.findall(r"HS\d{3}", CASES))
    assert codes
    assert all(f"{code} " in known for code in codes)
    pages = re.findall(r"\]\(([^)#]+)\)", CASES)
    assert pages
    assert all((ROOT / "docs" / page).exists() for page in pages)


def test_every_symptom_leads_to_a_section() -> None:
    sections = {
        re.sub(r"[^a-z -]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^## (.*)$", LOW, re.M)
    }
    targets = re.findall(r"\]\(#([a-z-]+)\)", LOW)
    assert len(targets) >= 7
    assert set(targets) == sections


@pytest.mark.parametrize(("infer", "code"), [("right.h5", 0), ("broken.h5", 1)])
def test_the_workflow_reports_and_fails_as_it_says(infer: str, code: int, folder: Path) -> None:
    shutil.copy(str(files("hsprobe.data") / infer), folder / "infer.h5")
    workflow: Any = yaml.safe_load(_block(CI, "yaml"))
    (job,) = workflow["jobs"].values()
    steps = {step["name"]: step["run"].strip() for step in job["steps"] if "run" in step}
    assert _needs_a_server(steps["Capture"])
    done = _run(steps["Compare"], folder, GITHUB_STEP_SUMMARY=str(folder / "summary.md"))
    assert done.returncode == code
    assert done.stdout.startswith("::error title=hsprobe HS102" if code else "::notice")
    assert (folder / "summary.md").read_text().startswith("### hsprobe: ")
    reports = _run(steps["Reports"], folder)
    assert reports.returncode == 0, reports.stderr
    for name in ("report.html", "junit.xml", "comment.md"):
        assert (folder / name).stat().st_size > 200
    assert "comment.md" in shlex.split(steps["Comment"].split("}}")[1])
    assert steps["Install"].startswith("pip install 'hsprobe[sglang,html]'")


def test_the_schema_command_prints_the_published_schema(folder: Path) -> None:
    (command, update) = _commands(CI)
    done = _run(command, folder)
    assert done.stdout == (ROOT / "hsprobe/report/schema/report.schema.json").read_text()
    assert update == "pytest --hsprobe-update"


def test_the_suite_of_the_page_passes_against_a_recorded_server(folder: Path) -> None:
    """With the server's fixtures replaced by a trace of it; tests/plugin has the real one."""
    settings = configparser.ConfigParser()
    settings.read_string(_block(CI, "ini"))
    arguments = settings["pytest"]["hsprobe_server_args"].split()
    assert {word.split("=")[0] for word in arguments} >= {"--model-path", "--speculative-algorithm"}
    (folder / "pytest.ini").write_text(_block(CI, "ini"))
    (folder / "test_page.py").write_text(_block(CI, "python"))
    (folder / "conftest.py").write_text(
        "import pytest\n"
        "@pytest.fixture\n"
        "def hsprobe_server():\n    return 'infer.h5'\n"
        "@pytest.fixture\n"
        "def hsprobe_capture():\n    return lambda prompts, max_new_tokens: 'infer.h5'\n"
    )
    for command in ("pytest -q --hsprobe-update", "pytest -q"):
        done = _run(f"python -m {command} -p no:cacheprovider", folder)
        assert "2 passed" in done.stdout, done.stdout
    (baseline,) = (folder / "hsprobe_baselines").iterdir()
    assert baseline.stat().st_size < 100_000
