"""Shards on real Ray workers of this machine: the same results, whatever happens to a worker."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from hsprobe.cli import main
from hsprobe.cluster.continued import Continued, about, encoded
from hsprobe.cluster.journal import Journal
from hsprobe.cluster.rays import RayEngine
from hsprobe.compare.engine import Local, using
from hsprobe.compare.shards import Shard
from hsprobe.compare.tables import Source, Tables
from hsprobe.diagnose import diff
from hsprobe.errors import HsprobeError
from hsprobe.fixtures.dumps import specforge
from hsprobe.fixtures.dumps.states import read_reference
from tests.cluster.pair import shards, write

REFERENCE = Path(__file__).parents[1] / "formats/data/reference.h5"


@pytest.fixture(scope="module")
def engine() -> Iterator[RayEngine]:
    with RayEngine(workers=2) as engine:
        yield engine


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    return write(folder / "a.h5", 8000, 256, 0.0), write(folder / "b.h5", 8000, 256, 0.01)


def _all(results: Any) -> list[Any]:
    return [encoded(one) for result in results for one in result]


def _pid(_: int) -> int:
    return os.getpid()


def test_workers_give_bit_for_bit_what_this_process_gives(engine: RayEngine, pair: tuple[Path, Path]) -> None:
    work = shards(*pair, 16)
    with Tables() as tables:
        assert _all(engine.run(work, tables)) == _all(Local().run(work, tables))
    assert os.getpid() not in set(engine.map(_pid, range(8)))


def test_a_killed_worker_loses_nothing(
    engine: RayEngine, pair: tuple[Path, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    work = shards(*pair, 60)
    workers = set(engine.map(_pid, range(16)))
    with Tables() as tables:
        expected = _all(Local().run(work, tables))
        running = engine.run(work, tables)
        results = [next(running)]
        for worker in workers:
            os.kill(worker, signal.SIGKILL)
        results += running
    assert _all(results) == expected
    assert workers - set(engine.map(_pid, range(16))) == workers
    shown = capfd.readouterr()
    assert shown.out + shown.err == ""


def test_it_listens_on_loopback_alone(engine: RayEngine) -> None:
    inner = set(_children(os.getpid()))
    inodes = {
        str(fd.readlink()).removeprefix("socket:[").rstrip("]")
        for pid in inner
        for fd in Path(f"/proc/{pid}/fd").iterdir()
        if fd.is_symlink() and str(fd.readlink()).startswith("socket:[")
    }
    addresses = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                addresses.append(words[1].rpartition(":")[0])
    assert len(addresses) >= 3
    loopback = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
    assert set(addresses) <= loopback


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *_children(int(child))]
    return found


def test_a_file_that_workers_cannot_reach_is_named_with_the_host(
    engine: RayEngine, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    [shard] = shards(*pair, 1)
    assert isinstance(shard.left, Source)
    missing = tmp_path / "only-here.h5"
    place = replace(shard.left.places[0], file=str(missing))
    missing.write_bytes(pair[0].read_bytes())
    engine._sizes[str(missing)] = missing.stat().st_size
    missing.unlink()
    gone = replace(shard, left=Source((place,)))
    with Tables() as tables, pytest.raises(HsprobeError) as trouble:
        list(engine.run([gone], tables))
    assert trouble.value.what == f"The worker on {socket.gethostname()} cannot open {missing}."
    missing.write_bytes(b"another")
    with Tables() as tables, pytest.raises(HsprobeError, match="has another file at"):
        list(engine.run([gone], tables))


def test_a_damaged_file_is_trouble_as_in_this_process(
    engine: RayEngine, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    data = bytearray(pair[0].read_bytes())
    bad = tmp_path / "bad.h5"
    bad.write_bytes(data)
    work: list[Shard] = shards(bad, pair[1], 4)
    data[len(data) // 3] ^= 0xFF
    bad.write_bytes(data)
    with Tables() as tables, pytest.raises(HsprobeError, match="checksum does not match"):
        list(engine.run(work, tables))


def test_the_token_ids_of_a_dump_are_read_by_workers(engine: RayEngine, tmp_path: Path) -> None:
    specforge.write(tmp_path / "dump", read_reference(REFERENCE), [2, 5, 8])
    bad = next((tmp_path / "dump").rglob("*.ckpt"))
    bad.with_name("data_99.ckpt").write_bytes(bad.read_bytes()[:500])
    infer = str(files("hsprobe.data") / "right.h5")
    here = diff(tmp_path / "dump", infer)
    with using(engine):
        there = diff(tmp_path / "dump", infer)
    assert there == here
    assert [finding.name for finding in there.findings] == ["LAYER_SHIFT"]


def test_what_only_this_process_reaches_is_done_here_in_its_turn(
    engine: RayEngine, pair: tuple[Path, Path]
) -> None:
    work = shards(*pair, 6)
    with Tables() as tables:
        expected = _all(Local().run(work, tables))
        views = [
            replace(one, left=tables.of(one.left)) if number % 2 else one for number, one in enumerate(work)
        ]
        assert {one.portable for one in views} == {True, False}
        assert _all(engine.run(views, tables)) == expected


def test_a_journal_is_continued_on_workers(
    engine: RayEngine, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    work = shards(*pair, 12)
    with Tables() as tables, Journal(tmp_path / "j", about({})) as journal:
        expected = _all(Local().run(work, tables))
        list(Continued(engine, journal, pair).run(work[4:9], tables))
        continued = Continued(engine, journal, pair)
        assert _all(continued.run(work, tables)) == expected
        assert continued.taken == 5


def test_the_command_is_quiet_and_gives_the_same_report(pair: tuple[Path, Path], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hsprobe", "diff", str(pair[0]), str(pair[1]), "--format", "json"]
    here = subprocess.run(command, capture_output=True, text=True, timeout=300)
    there = subprocess.run([*command, "--engine", "ray"], capture_output=True, text=True, timeout=580)
    assert there.stderr == here.stderr == ""
    assert there.returncode == here.returncode in (0, 1)
    assert json.loads(there.stdout) == json.loads(here.stdout)


def test_a_running_cluster_is_joined_and_left_running(
    engine: RayEngine, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    address = engine._ray.get_runtime_context().gcs_address
    assert address.startswith("127.0.0.1:")
    command = [sys.executable, "-m", "hsprobe", "diff", *map(str, pair), "--format", "json"]
    command += ["--engine", "ray", "--ray-address"]
    done = subprocess.run([*command, address], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode in (0, 1), done.stderr
    assert done.stderr == ""
    here = diff(*pair)
    assert json.loads(done.stdout)["verdict"] == ("same" if here.same else "different")
    assert list(engine.map(len, ["ab"])) == [2]


def test_without_ray_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], pair: tuple[Path, Path]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["diff", *map(str, pair), "--engine", "ray"]) == 2
    assert "pip install 'hsprobe[ray]'" in capsys.readouterr().err


def test_an_address_alone_is_not_passed_over(
    capsys: pytest.CaptureFixture[str], pair: tuple[Path, Path]
) -> None:
    assert main(["diff", *map(str, pair), "--ray-address", "auto"]) == 2
    assert "is for --engine ray" in capsys.readouterr().err


def test_a_cluster_that_is_not_there_is_named(pair: tuple[Path, Path]) -> None:
    command = [sys.executable, "-m", "hsprobe", "diff", *map(str, pair), "--engine", "ray"]
    done = subprocess.run(
        [*command, "--ray-address", "127.0.0.1:1"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2
    assert "no Ray cluster to be reached at 127.0.0.1:1" in done.stderr
    assert "Traceback" not in done.stderr
