"""A rank whose process ended or was stopped is named; servers that end as a whole are left to others."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hsprobe.capture import processes
from hsprobe.capture.processes import RankProcesses, RankTrouble


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two processes, and the spools named after them."""
    started = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    for place, process in enumerate(started):
        (tmp_path / f"pp0-dp0-tp{place}-{process.pid}.spool").touch()
    yield started
    for process in started:
        process.kill()
        process.wait()


def test_living_ranks_are_no_trouble(tmp_path: Path, ranks: list[subprocess.Popen[bytes]]) -> None:
    RankProcesses(tmp_path).check()


def test_a_rank_that_ended_is_named_even_before_it_is_reaped(
    tmp_path: Path, ranks: list[subprocess.Popen[bytes]]
) -> None:
    watched = RankProcesses(tmp_path)
    ranks[1].kill()
    os.waitid(os.P_PID, ranks[1].pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(RankTrouble, match=rf"^The server's process {ranks[1].pid} \(tp 1\) ended"):
        watched.check()
    ranks[1].wait()
    with pytest.raises(RankTrouble, match=r"\(tp 1\) ended"):
        watched.check()


def test_ranks_that_ended_before_are_not_this_captures(
    tmp_path: Path, ranks: list[subprocess.Popen[bytes]]
) -> None:
    ranks[1].kill()
    ranks[1].wait()
    RankProcesses(tmp_path).check()


def test_that_all_ended_is_left_to_the_server_unless_it_does_not_notice(
    tmp_path: Path, ranks: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "UNNOTICED_SECONDS", 0.2)
    watched = RankProcesses(tmp_path)
    for process in ranks:
        process.kill()
        process.wait()
    watched.check()
    time.sleep(0.3)
    with pytest.raises(RankTrouble, match=r"\(tp 0\) and .*\(tp 1\) ended in the middle of the capture"):
        watched.check()


def test_a_stopped_rank_is_named_with_what_makes_it_go_on(
    tmp_path: Path, ranks: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "STOPPED_SECONDS", 0.2)
    watched = RankProcesses(tmp_path)
    ranks[0].send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, ranks[0].pid, os.WSTOPPED | os.WNOWAIT)
    watched.check()
    time.sleep(0.3)
    with pytest.raises(RankTrouble, match=rf"\(tp 0\) has been stopped.*kill -CONT {ranks[0].pid}"):
        watched.check()
    ranks[0].send_signal(signal.SIGCONT)
    os.waitid(os.P_PID, ranks[0].pid, os.WCONTINUED)
    watched.check()
