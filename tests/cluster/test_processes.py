"""Shards on processes of this machine: the same results whatever happens, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsprobe.cli import main
from hsprobe.cluster import processes
from hsprobe.cluster.continued import Continued, about, encoded
from hsprobe.cluster.journal import Journal
from hsprobe.cluster.processes import PAYS, ProcessEngine
from hsprobe.compare.engine import Local, using
from hsprobe.compare.shards import Shard
from hsprobe.compare.tables import Source, Tables
from hsprobe.diagnose import diff, identify, ids
from hsprobe.errors import HsprobeError
from hsprobe.fixtures.dumps import specforge
from hsprobe.fixtures.dumps.states import read_reference
from tests.cluster.pair import shards, write
from tests.cluster.tasks import about_itself, command_of, dies, number_of

REFERENCE = Path(__file__).parents[1] / "formats/data/reference.h5"


@pytest.fixture
def engine() -> Iterator[ProcessEngine]:
    with ProcessEngine(2, pays=1) as engine:
        yield engine


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    return write(folder / "a.h5", 8000, 256, 0.0), write(folder / "b.h5", 8000, 256, 0.01)


def _all(results: Any) -> list[Any]:
    return [encoded(one) for result in results for one in result]


def _here(work: list[Shard]) -> list[Any]:
    with Tables() as tables:
        return _all(Local().run(work, tables))


def _children(pid: int) -> list[int]:
    tasks = list(Path(f"/proc/{pid}/task").iterdir())
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def _workers() -> list[int]:
    return [pid for pid in _children(os.getpid()) if b"hsprobe.cluster.worker" in command_of(pid)]


def _wait_for(count: int) -> None:
    """Wait until so many workers run: those that were asked for start by themselves."""
    began = time.monotonic()
    while len(_workers()) < count:
        assert time.monotonic() - began < 30
        time.sleep(0.01)
    assert len(_workers()) == count


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_any_number_of_workers_gives_the_same_to_the_bit(workers: int, pair: tuple[Path, Path]) -> None:
    work = shards(*pair, 30)
    with ProcessEngine(workers, pays=1) as engine, Tables() as tables:
        assert _all(engine.run(work, tables)) == _here(work)
        _wait_for(workers - 1)
    assert _workers() == []


def _leave_it(task: processes._Task) -> None:
    """In place of `do_here`: workers do it all."""


def test_workers_alone_give_the_same_to_the_bit(
    engine: ProcessEngine, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes._Task, "do_here", _leave_it)
    work = shards(*pair, 30)
    with Tables() as tables:
        assert _all(engine.run(work, tables)) == _here(work)


def test_a_worker_has_one_thread_and_neither_sockets_nor_torch(engine: ProcessEngine) -> None:
    found = {pid: (threads, more) for pid, threads, more in engine.map(about_itself, range(20))}
    del found[os.getpid()]
    assert list(found.values()) == [(1, [])]


def test_small_work_starts_none_and_many_small_works_do(pair: tuple[Path, Path]) -> None:
    work = shards(*pair, PAYS // 2)
    with ProcessEngine(2) as engine, Tables() as tables:
        list(engine.run(work, tables))
        assert _workers() == []
        for _ in range(3):
            list(engine.run(work, tables))
        _wait_for(1)


def test_of_large_files_workers_start_at_once(tmp_path: Path) -> None:
    (tmp_path / "small.h5").touch()
    with ProcessEngine(2, [tmp_path, tmp_path / "small.h5", tmp_path / "none.h5"]):
        assert _workers() == []
    with (tmp_path / "large.h5").open("wb") as file:
        file.truncate(1 << 30)
    with ProcessEngine(2, [tmp_path / "large.h5"]):
        _wait_for(1)
    assert _workers() == []


def test_a_worker_that_cannot_be_started_says_why(
    engine: ProcessEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setattr(processes._Task, "do_here", _leave_it)
    with pytest.raises(HsprobeError, match="No such file or directory: '/nowhere/python'"):
        list(engine.map(number_of, ["1"]))


def test_a_killed_worker_loses_nothing(
    engine: ProcessEngine, pair: tuple[Path, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    work = shards(*pair, 120)
    with Tables() as tables:
        running, results = engine.run(work, tables), []
        killed = set()
        for count, result in enumerate(running):
            results.append(result)
            if count % 20 == 10:
                killed |= set(_workers())
                for pid in _workers():
                    os.kill(pid, signal.SIGKILL)
    assert _all(results) == _here(work)
    assert len(killed) >= 2
    shown = capfd.readouterr()
    assert shown.out + shown.err == ""


def test_a_worker_that_always_dies_is_given_up(
    engine: ProcessEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_TRIES", 3)
    with pytest.raises(HsprobeError, match="ended 3 times over in the middle of its work: signal 9"):
        list(engine.map(dies, range(2)))


def test_trouble_is_the_same_sentence_and_comes_in_its_turn(
    engine: ProcessEngine, capfd: pytest.CaptureFixture[str]
) -> None:
    found = engine.map(number_of, ["1", "2", "nothing", "4"])
    assert [next(found), next(found)] == [1, 2]
    with pytest.raises(HsprobeError) as trouble:
        next(found)
    assert str(trouble.value) == "There is nothing. Give a number."


def test_a_fault_of_the_program_in_a_worker_shows_where_it_was(engine: ProcessEngine) -> None:
    with pytest.raises((RuntimeError, ValueError), match="invalid literal for int"):
        list(engine.map(number_of, ["1"] * 20 + ["x"]))


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_damaged_file_is_trouble_as_in_one_process(
    damage: str, pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = bytearray(pair[0].read_bytes())
    bad = tmp_path / "bad.h5"
    bad.write_bytes(data)
    work = shards(bad, pair[1], 16)
    if damage == "flipped":
        data[len(data) // 3] ^= 0xFF
    bad.write_bytes(data[: len(data) // 2] if damage == "cut" else data)
    said = []
    for workers in (1, 2):
        with (
            ProcessEngine(workers, pays=1) as engine,
            Tables() as tables,
            pytest.raises(HsprobeError) as trouble,
        ):
            list(engine.run(work, tables))
        said.append(str(trouble.value))
    assert said[0] == said[1]
    assert "bad.h5" in said[0]


def test_rows_with_nan_are_counted_alike(engine: ProcessEngine, tmp_path: Path) -> None:
    for name in ("a.h5", "b.h5"):
        write(tmp_path / name, 2000, 256, 0.0)
    import h5py

    with h5py.File(tmp_path / "b.h5", "r+") as file:
        file["ranks/0/tensors/layer/002/data"][700:703, 5] = np.nan
    work = shards(tmp_path / "a.h5", tmp_path / "b.h5", 16)
    with Tables() as tables:
        results = list(engine.run(work, tables))
    assert _all(results) == _here(work)
    assert sum(one.right_nonfinite for result in results for one in result) == 3


def test_the_token_ids_of_a_dump_are_read_by_all(
    engine: ProcessEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specforge.write(tmp_path / "dump", read_reference(REFERENCE), [2, 5, 8])
    bad = next((tmp_path / "dump").rglob("*.ckpt"))
    bad.with_name("data_99.ckpt").write_bytes(bad.read_bytes()[:500])
    infer = str(files("hsprobe.data") / "right.h5")
    here = diff(tmp_path / "dump", infer)
    monkeypatch.setattr(ids, "_ALONE", 1)
    monkeypatch.setattr(ids, "_BATCH", 1)
    monkeypatch.setattr(processes._Task, "do_here", _leave_it)
    with using(engine):
        there = diff(tmp_path / "dump", infer)
    assert there == here
    assert [finding.name for finding in there.findings] == ["LAYER_SHIFT"]


@pytest.mark.parametrize("infer", ["broken.h5", "right.h5"])
def test_depths_are_told_apart_by_workers_as_here(
    infer: str, engine: ProcessEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [Path(str(files("hsprobe.data") / name)) for name in ("train.h5", infer)]
    here = diff(*paths)
    asked: list[processes._Task] = []
    monkeypatch.setattr(identify, "_PAYS", 0)
    with using(engine):
        both = diff(*paths)
        monkeypatch.setattr(processes._Task, "do_here", lambda task: asked.append(task))
        there = diff(*paths)
    assert there == both == here
    assert len(asked) > 3


def test_what_only_this_process_reaches_is_done_here(engine: ProcessEngine, pair: tuple[Path, Path]) -> None:
    work = shards(*pair, 12)
    with Tables() as tables:
        views = [
            replace(one, left=tables.of(one.left)) if number % 2 else one for number, one in enumerate(work)
        ]
        assert {one.portable for one in views} == {True, False}
        assert _all(engine.run(views, tables)) == _here(work)


def test_a_journal_is_continued_on_workers(
    engine: ProcessEngine, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    work = shards(*pair, 24)
    with Tables() as tables, Journal(tmp_path / "j", about({})) as journal:
        list(Continued(engine, journal, pair).run(work[4:9], tables))
        continued = Continued(engine, journal, pair)
        assert _all(continued.run(work, tables)) == _here(work)
        assert continued.taken == 5


def test_work_that_is_given_up_halfway_leaves_the_engine_sound(
    engine: ProcessEngine, pair: tuple[Path, Path]
) -> None:
    work = shards(*pair, 40)
    with Tables() as tables:
        running = engine.run(work, tables)
        next(running)
        del running
        assert _all(engine.run(work, tables)) == _here(work)


# A comparison of many small shards, which does not come to its end, and says when it has a worker at work.
_ENDLESS = """
import itertools, os, sys, time
from functools import partial
from hsprobe.cluster import processes
from hsprobe.compare import direct, engine
from hsprobe.compare.shards import cut
direct.cut = lambda *given: itertools.cycle(list(cut(*given, most=200_000)))
take = processes._Task.answer
def noted(task):
    print(os.getpid(), flush=True)
    return take(task)
processes._Task.answer = noted
from hsprobe.cli import main
sys.exit(main(["diff", sys.argv[1], sys.argv[2], "--workers", "3"]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_is_left_however_the_command_ends(number: signal.Signals, pair: tuple[Path, Path]) -> None:
    running = subprocess.Popen(
        [sys.executable, "-c", _ENDLESS, *map(str, pair)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A test run in the background of a shell inherits an ignored SIGINT, which no person's Ctrl-C meets.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert running.stdout is not None
    workers: list[int] = []
    while len(workers) < 2 and running.stdout.readline():
        workers = [pid for pid in _children(running.pid) if b"hsprobe.cluster.worker" in command_of(pid)]
    assert len(workers) == 2
    running.send_signal(number)
    began = time.monotonic()
    _, said = running.communicate(timeout=60)
    assert running.returncode == (130 if number == signal.SIGINT else -number)
    assert said == ""
    while any(_runs(pid) for pid in workers):
        assert time.monotonic() - began < 30
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def test_a_script_without_a_main_guard_may_call_the_assertions(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """And runs once; nothing is imported from the folder it is called in."""
    script = tmp_path / "scripts/check.py"
    script.parent.mkdir()
    script.write_text(
        "import sys\n"
        "print('once')\n"
        "from functools import partial\n"
        "from hsprobe.cluster import processes\n"
        "from hsprobe.compare import direct\n"
        "from hsprobe.compare.shards import cut\n"
        "direct.cut = partial(cut, most=200_000)\n"
        "processes.usable_cores = lambda: 2\n"
        "from hsprobe.testing import assert_traces_match\n"
        "assert_traces_match(sys.argv[1], sys.argv[1])\n"
        "assert_traces_match(sys.argv[1], sys.argv[2])\n"
    )
    here = tmp_path / "here"
    here.mkdir()
    for name in ("pickle", "subprocess", "numpy", "hsprobe"):
        (here / f"{name}.py").write_text("raise SystemExit('imported from the folder of a dump')\n")
    done = subprocess.run(
        [sys.executable, str(script), *map(str, pair)], cwd=here, capture_output=True, text=True, timeout=300
    )
    assert done.stdout == "once\n"
    assert done.returncode == 1
    assert "DifferentError: the traces differ" in done.stderr


def test_the_command_is_quiet_and_gives_the_same_report(pair: tuple[Path, Path]) -> None:
    program = (
        "import sys\n"
        "from functools import partial\n"
        "from hsprobe.compare import direct\n"
        "from hsprobe.compare.shards import cut\n"
        "direct.cut = partial(cut, most=200_000)\n"
        "from hsprobe.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-c", program, "diff", *map(str, pair), "--format", "json", "--workers"]
    here, there = (
        subprocess.run([*command, workers], capture_output=True, text=True, timeout=300)
        for workers in ("1", "2")
    )
    assert there.stderr == here.stderr == ""
    assert there.returncode == here.returncode in (0, 1)
    assert json.loads(there.stdout) == json.loads(here.stdout)


def test_a_number_of_workers_for_a_running_cluster_is_refused(
    capsys: pytest.CaptureFixture[str], pair: tuple[Path, Path]
) -> None:
    command = ["diff", *map(str, pair), "--engine", "ray", "--ray-address", "auto", "--workers", "2"]
    assert main(command) == 2
    assert "Leave out --workers" in capsys.readouterr().err


def test_a_file_that_is_gone_is_named(engine: ProcessEngine, pair: tuple[Path, Path]) -> None:
    work = shards(*pair, 8)
    assert isinstance(work[0].left, Source)
    place = replace(work[0].left.places[0], file="/nowhere/a.h5")
    gone = [replace(one, left=Source((place,))) for one in work]
    with Tables() as tables, pytest.raises(HsprobeError, match=r"/nowhere/a\.h5"):
        list(engine.run(gone, tables))
