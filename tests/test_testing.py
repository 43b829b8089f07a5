"""The assertion for other people's tests."""

import subprocess
import sys
from pathlib import Path

import pytest

from hsprobe.errors import HsprobeError
from hsprobe.testing import assert_traces_match
from tests.synthetic import write_infer, write_train


def test_matching_traces_pass(tmp_path: Path) -> None:
    assert_traces_match(write_train(tmp_path / "t.h5", (3, 6, 8)), write_infer(tmp_path / "i.h5", (3, 6, 8)))


def test_the_message_is_the_finding(tmp_path: Path) -> None:
    train, infer = write_train(tmp_path / "t.h5", (3, 6, 8)), write_infer(tmp_path / "i.h5", (0, 3, 6))
    with pytest.raises(AssertionError) as caught:
        assert_traces_match(str(train), str(infer))
    lines = str(caught.value).splitlines()
    assert "carries the embedding output (depth 0)" in lines[1]
    assert "[-1, 2, 5]  ->  [2, 5, 7]" in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_trouble_is_not_a_failed_assertion(tmp_path: Path) -> None:
    with pytest.raises(HsprobeError):
        assert_traces_match(write_train(tmp_path / "t.h5"), tmp_path / "none.h5")


def test_the_traceback_of_a_failing_test_ends_in_the_test(tmp_path: Path) -> None:
    write_train(tmp_path / "t.h5", (3, 6, 8))
    write_infer(tmp_path / "i.h5", (2, 5, 7))
    (tmp_path / "test_it.py").write_text(
        "from hsprobe.testing import assert_traces_match\n"
        "def test_it():\n"
        "    assert_traces_match('t.h5', 'i.h5')\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "every aux chunk is 1 layer too early" in done.stdout
    assert "hsprobe/testing.py" not in done.stdout.split("short test summary")[0]


def test_importing_it_is_light() -> None:
    code = "import sys, hsprobe.testing; print([m for m in ('torch', 'h5py') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_comparing_does_not_need_torch(tmp_path: Path) -> None:
    write_train(tmp_path / "t.h5", (3, 6, 8))
    write_infer(tmp_path / "i.h5", (3, 6, 8))
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from hsprobe.testing import assert_traces_match\n"
        f"assert_traces_match({str(tmp_path / 't.h5')!r}, {str(tmp_path / 'i.h5')!r})"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
