"""A journal survives whatever stops its writer, and tells its own file from others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsprobe.cluster.journal import Journal
from hsprobe.errors import HsprobeError

ABOUT = {"TRAIN": ["a", 1]}


def _write(path: Path, count: int) -> None:
    with Journal(path, ABOUT) as journal:
        for number in range(journal.kept, count):
            journal.put(str(number), [number, "x" * number])


def test_entries_are_there_in_the_next_run(tmp_path: Path) -> None:
    _write(tmp_path / "j", 5)
    with Journal(tmp_path / "j", ABOUT) as journal:
        assert journal.kept == 5
        assert journal.get("4") == [4, "xxxx"]
        assert journal.get("5") is None
        assert journal.anew == ""


def test_of_a_journal_cut_anywhere_the_whole_entries_are_kept(tmp_path: Path) -> None:
    _write(tmp_path / "whole", 4)
    data = (tmp_path / "whole").read_bytes()
    ends = [at + 1 for at, byte in enumerate(data) if byte == ord("\n")]
    for length in range(ends[0], len(data) + 1):
        path = tmp_path / "cut"
        path.write_bytes(data[:length])
        with Journal(path, ABOUT) as journal:
            assert journal.kept == sum(end <= length for end in ends) - 1
            journal.put("more", 1)
        with Journal(path, ABOUT) as journal:
            assert journal.get("more") == 1


@settings(max_examples=60, deadline=None)
@given(at=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_no_damaged_entry_is_believed(tmp_path_factory: pytest.TempPathFactory, at: int, bit: int) -> None:
    path = tmp_path_factory.mktemp("j") / "j"
    _write(path, 6)
    data = bytearray(path.read_bytes())
    first = data.index(b"\n") + 1
    at = first + at % (len(data) - first)
    data[at] ^= 1 << bit
    path.write_bytes(data)
    with Journal(path, ABOUT) as journal:
        assert journal.kept < 6
        for number in range(journal.kept):
            assert journal.get(str(number)) == [number, "x" * number]


def test_what_changed_is_said_and_nothing_old_is_used(tmp_path: Path) -> None:
    _write(tmp_path / "j", 3)
    with Journal(tmp_path / "j", {"TRAIN": ["a", 2]}) as journal:
        assert journal.anew == "TRAIN changed since"
        assert journal.kept == 0
        assert journal.get("0") is None


@pytest.mark.parametrize("content", [b"hello\n", b"\x89HDF\r\n\x1a\n", b"x" * 100])
def test_another_file_is_not_overwritten(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "j").write_bytes(content)
    with pytest.raises(HsprobeError, match="is no journal"):
        Journal(tmp_path / "j", ABOUT)
    assert (tmp_path / "j").read_bytes() == content


def test_two_runs_do_not_share_one(tmp_path: Path) -> None:
    with Journal(tmp_path / "j", ABOUT), pytest.raises(HsprobeError, match="in use by another run"):
        Journal(tmp_path / "j", ABOUT)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(HsprobeError, match="cannot be written"):
        Journal(tmp_path / "none/j", ABOUT)


def test_a_writer_killed_at_any_moment_leaves_whole_entries(tmp_path: Path) -> None:
    path = tmp_path / "j"
    program = (
        "import sys; from pathlib import Path; from hsprobe.cluster.journal import Journal\n"
        f"with Journal(Path(sys.argv[1]), {ABOUT!r}) as journal:\n"
        "    for number in range(journal.kept, 10**6):\n"
        "        journal.put(str(number), [number, 'x' * 5000])\n"
    )
    kept = 0
    for _ in range(3):
        enough = 20_000 + (path.stat().st_size if path.exists() else 0)
        writer = subprocess.Popen([sys.executable, "-c", program, str(path)])
        while not path.exists() or path.stat().st_size < enough:
            assert writer.poll() is None
            time.sleep(0.01)
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        with Journal(path, ABOUT) as journal:
            assert journal.kept > kept
            kept = journal.kept
            assert journal.get(str(kept - 1)) == [kept - 1, "x" * 5000]
