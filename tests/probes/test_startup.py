"""How the probes get into the scheduler processes of an SGLang without plugins: by the environment alone.

The packages named sglang here are a few lines each; ``make test-sglang SGLANG=0.5.9`` runs the real one.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hsprobe.probes import startup

SCHEDULER = """
print("scheduler imported")
def run_scheduler_process(word):
    "What it does."
    import sys
    print(word, "hsprobe.probes.sglang.install" in sys.modules)
"""
# As SGLang does it: the function is imported by name, pickled by name, and run in a fresh interpreter.
SERVER = """
import multiprocessing
from sglang.srt.managers.scheduler import run_scheduler_process
if __name__ == "__main__":
    print(run_scheduler_process.__doc__, run_scheduler_process.__module__)
    child = multiprocessing.get_context("spawn").Process(target=run_scheduler_process, args=("ran",))
    child.start()
    child.join()
    raise SystemExit(child.exitcode)
"""


def sglang(folder: Path, *more: str) -> None:
    """A package with this name and a scheduler."""
    for place in ("sglang/srt/managers", *more):
        (folder / place).mkdir(parents=True, exist_ok=True)
    for place in folder.rglob("*"):
        if place.is_dir():
            (place / "__init__.py").touch()
    (folder / "sglang/srt/managers/scheduler.py").write_text(SCHEDULER)


def run(folder: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command of Python's below ``hsprobe run``, with a folder on its path."""
    others = {name: value for name, value in os.environ.items() if name != "HSPROBE_CAPTURE"}
    return subprocess.run(
        [sys.executable, "-m", "hsprobe", "run", "--", sys.executable, *command],
        env={**others, "PYTHONPATH": str(folder), **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_spawned_scheduler_begins_with_the_probes_and_only_there(tmp_path):
    sglang(tmp_path)
    (tmp_path / "server.py").write_text(SERVER)
    (tmp_path / "other.py").write_text("def begin():\n    print('another began')\n")
    info = tmp_path / "other-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[hsprobe.startup]\nother = other:begin\n")
    done = run(tmp_path, "server.py")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == ["scheduler imported", "What it does. sglang.srt.managers.scheduler"]
    assert lines[2:] == ["scheduler imported", "another began", "ran True"]


def test_a_release_with_plugins_is_left_alone(tmp_path):
    sglang(tmp_path, "sglang/srt/plugins")
    (tmp_path / "server.py").write_text(SERVER)
    done = run(tmp_path, "server.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "ran False"


def test_probes_that_cannot_start_do_not_stop_the_server(tmp_path):
    """These fail since such an SGLang has nothing that they hook."""
    sglang(tmp_path)
    (tmp_path / "server.py").write_text(SERVER)
    done = run(tmp_path, "server.py", HSPROBE_DEPTHS="not a number")
    assert done.returncode == 0, done.stderr
    assert "could not start hsprobe; the server goes on without it" in done.stderr
    assert done.stdout.splitlines()[-1].startswith("ran True")


def test_nothing_is_imported_where_no_scheduler_is(tmp_path):
    done = run(
        tmp_path, "-c", "import sys; print({m.split('.')[0] for m in sys.modules} & {'hsprobe', 'torch'})"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "set()\n", "")


def test_a_sitecustomize_of_others_still_runs_and_its_errors_show(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.customized = __file__\n")
    done = run(tmp_path, "-c", "print(customized)")
    assert (done.stdout.strip(), done.stderr) == (str(tmp_path / "sitecustomize.py"), "")
    (tmp_path / "sitecustomize.py").write_text("raise RuntimeError('theirs')\n")
    done = run(tmp_path, "-c", "print('goes on')")
    assert done.stdout == "goes on\n"
    assert "RuntimeError: theirs" in done.stderr


def test_a_python_without_hsprobe_says_so_and_serves(tmp_path):
    sglang(tmp_path)
    code = "from sglang.srt.managers.scheduler import run_scheduler_process as run; run('ran')"
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sitecustomize; {code}"],
        env={"PYTHONPATH": f"{startup.PATH}{os.pathsep}{tmp_path}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "ran False"
    assert "has no hsprobe" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_command_gets_its_words_its_environment_and_its_exit_code(tmp_path):
    code = "import os, sys; print(sys.argv[1:], os.environ['HSPROBE_CAPTURE']); sys.exit(7)"
    done = run(tmp_path, "-c", code, "--host", "x", "--", "-h")
    assert (done.returncode, done.stdout) == (7, "['--host', 'x', '--', '-h'] 1\n")
    assert run(tmp_path, "-c", code, HSPROBE_CAPTURE="/spools").stdout == "[] /spools\n"


@pytest.mark.parametrize("command", [(), ("--", "no-such-program", "x"), ("--", "/etc/hostname")])
def test_what_cannot_be_run_is_one_sentence_and_exit_code_2(command):
    done = subprocess.run(
        [sys.executable, "-m", "hsprobe", "run", *command], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert done.stderr.startswith("hsprobe: ")


def test_the_folder_is_on_the_path_once_and_first():
    once = startup.environment({"PYTHONPATH": "/a:/b"})
    assert once["PYTHONPATH"] == f"{startup.PATH}:/a:/b"
    assert startup.environment(once) == once
