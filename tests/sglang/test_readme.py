"""Every command in the README runs, in the README's order, in one folder."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import release

from hsprobe.capture.client import answers_ok
from hsprobe.fixtures import cpu
from hsprobe.fixtures.demo import TRAINED
from hsprobe.probes import startup

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SECONDS = 600
PORT = "31913"


def commands() -> list[str]:
    blocks = re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    return [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """What the README's names stand for: TARGET, DRAFT, prompts.jsonl, train.h5, hidden_states."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "TARGET").symlink_to(TRAINED / "target")
    (folder / "DRAFT").symlink_to(TRAINED / "draft")
    lines = (TRAINED / "prompts.jsonl").read_text().splitlines(keepends=True)
    (folder / "prompts.jsonl").write_text("".join(lines[:3]))
    run(
        "hsprobe capture --model TARGET -o train.h5 --prompts prompts.jsonl --layers 2,5,8 --dtype float32",
        folder,
    )
    run("hsprobe convert train.h5 hidden_states --to safetensors", folder)
    return folder


def with_cpu(command: str) -> list[str]:
    """The command as words, with what a server or a reference needs on a machine without a GPU."""
    words = shlex.split(command.replace("30000", PORT))
    if "--model-path" in words:
        words += cpu.SERVER_ARGUMENTS
    if words[:2] == ["hsprobe", "capture"] and "--model" in words:
        words += ["--dtype", "float32"]
    return words


def environment() -> dict[str, str]:
    found = cpu.environment()
    # What brings the probes into an SGLang without plugins is here the commands' own affair.
    parts = found["PYTHONPATH"].split(os.pathsep)
    found["PYTHONPATH"] = os.pathsep.join(part for part in parts if part != str(startup.PATH))
    found["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{found['PATH']}"
    return found


def run(command: str, folder: Path, expected: int = 0) -> subprocess.CompletedProcess:
    done = subprocess.run(
        with_cpu(command), cwd=folder, env=environment(), capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == expected, f"$ {command}\n{done.stdout}{done.stderr}"
    return done


def serve(command: str, folder: Path) -> subprocess.Popen:
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(
            with_cpu(command),
            cwd=folder,
            env=environment(),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline = time.monotonic() + SECONDS
    while not answers_ok(f"http://127.0.0.1:{PORT}/health"):
        assert server.poll() is None, (folder / "server.log").read_text()[-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.5)
    return server


def exit_code(command: str) -> int:
    """0.5.9 captures its CUDA graphs with other layer ids than the configured ones (CK112)."""
    installed = command.startswith("hsprobe check") and "--sglang" not in command
    return int(installed and release.VERSION == "0.5.9")


def test_every_hsprobe_command_of_the_readme_runs(folder):
    ran, servers = [], []
    try:
        for command in commands():
            if command.startswith("hsprobe run "):
                servers.append(serve(command, folder))
            elif command.startswith("hsprobe "):
                run(command, folder, expected=exit_code(command))
            else:
                continue
            ran.append(command)
    finally:
        for server in servers:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
    assert len(ran) >= 9
    assert json.loads((folder / "report.json").read_text())["verdict"] == "same"


def test_python_snippets_of_the_readme_run(folder):
    (snippet,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (folder / "test_snippet.py").write_text(snippet)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_snippet.py"],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


@release.embeds_llama
def test_demo_finds_the_fault_and_confirms_the_mend(tmp_path):
    """What ``make demo`` runs."""
    assert "$ make demo\n$ make test" in README
    assert "hsprobe.fixtures.demo" in (ROOT / "Makefile").read_text()
    done = subprocess.run(
        [sys.executable, "-m", "hsprobe.fixtures.demo", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={**os.environ, "COLUMNS": "100"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "aux chunk 0 carries the embedding output (depth 0)" in done.stdout
    assert "[-1, 5, 8]  ->  [2, 5, 8]" in done.stdout
    broken, right = map(float, re.findall(r"as SGLang reports it.*:\s+([\d.]+)", done.stdout))
    assert right > 3
    assert broken < right - 0.8


def test_installed_package_has_its_plugin_its_fixtures_and_nothing_at_the_top(tmp_path):
    """``pip install '.[sglang]'``, its dependencies being here already."""
    assert "pip install '.[sglang]'" in commands()
    with (ROOT / "pyproject.toml").open("rb") as file:
        assert "sglang" in tomllib.load(file)["project"]["optional-dependencies"]
    source, place = tmp_path / "source", tmp_path / "site"
    leave_out = shutil.ignore_patterns(".*", "build", "demo-out", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT, source, ignore=leave_out)
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index",
         "--target", str(place), str(source)],
        check=True,
    )  # fmt: skip
    top = {path.name for path in place.iterdir()} - {"bin", "__pycache__"}
    assert {name for name in top if not name.endswith(".dist-info")} == {"hsprobe"}
    assert (place / "hsprobe/fixtures/trained/draft/model.safetensors").is_file()
    assert (place / "hsprobe/fixtures/cpu/path/sgl_kernel/__init__.py").is_file()
    assert (place / "hsprobe/probes/startup/path/sitecustomize.py").is_file()
    for name in ("data/broken.h5", "report/html/page.js", "report/schema/report.schema.json"):
        assert (place / "hsprobe" / name).is_file()
    entry_points = next(place.glob("*.dist-info")) / "entry_points.txt"
    assert "hsprobe.probes.sglang:activate" in entry_points.read_text()
