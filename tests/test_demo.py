"""The first minute: `hsprobe demo`, with the base install alone."""

import subprocess
import sys
from importlib.resources import files
from pathlib import Path

# What the extras bring; importing any of it fails below.
EXTRAS = ("torch", "transformers", "sglang", "plotly")
CODE = f"""
import sys
for name in {EXTRAS!r}:
    sys.modules[name] = None
from hsprobe.cli import main
sys.exit(main(sys.argv[1:]))
"""


def _demo(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", CODE, "demo", *arguments], capture_output=True, text=True, cwd=cwd, check=False
    )


def test_it_shows_the_fault_and_the_mend(tmp_path: Path) -> None:
    done = _demo(cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    broken, right = done.stdout.split("# served with the ids that hsprobe named")
    assert "FAIL  aux chunk 0 carries the embedding output (depth 0)" in broken
    assert "[-1, 5, 8]  ->  [2, 5, 8]" in broken
    assert "OK    3 aux chunks carry depths 3, 6, 9 as trained" in right
    assert list(tmp_path.iterdir()) == []


def test_its_traces_can_be_had(tmp_path: Path) -> None:
    done = _demo("-o", "traces", cwd=tmp_path)
    assert "$ hsprobe diff traces/train.h5 traces/broken.h5" in done.stdout
    assert sorted(path.name for path in (tmp_path / "traces").iterdir()) == [
        "broken.h5",
        "right.h5",
        "train.h5",
    ]
    (tmp_path / "file").touch()
    trouble = _demo("-o", "file", cwd=tmp_path)
    assert trouble.returncode == 2
    assert "cannot be copied to file" in trouble.stderr


def test_shipped_traces_are_small_and_name_no_machine() -> None:
    traces = [trace.read_bytes() for trace in files("hsprobe.data").iterdir() if trace.name.endswith(".h5")]
    assert len(traces) == 3
    assert sum(map(len, traces)) < 600_000
    checkout, home = Path(__file__).parents[1], Path.home()
    for prefix in ("/home/", "/tmp/", f"{home}/", f"{checkout}/"):
        assert not any(prefix.encode() in trace for trace in traces)
