"""An interrupted comparison goes on where it was, and ends in the same report."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsprobe.cli import main
from hsprobe.cluster.continued import Continued, about, decoded, encoded
from hsprobe.cluster.journal import Journal
from hsprobe.compare import direct
from hsprobe.compare.engine import Local
from hsprobe.compare.shards import Direct, Shard, cut, run
from hsprobe.compare.statistics import ErrorStats
from hsprobe.compare.tables import Tables
from hsprobe.fixtures.dumps import specforge
from hsprobe.fixtures.dumps.states import read_reference
from tests.cluster.pair import shards, write

REFERENCE = Path(__file__).parents[1] / "formats/data/reference.h5"


class Counting(Local):
    """Runs shards here, and counts them."""

    def __init__(self, fails_after: int | None = None) -> None:
        self.ran, self.fails_after = 0, fails_after

    def run(self, shards: Iterable[Shard], tables: Tables) -> Iterator[list[Direct]]:
        for shard in shards:
            if self.ran == self.fails_after:
                raise KeyboardInterrupt
            self.ran += 1
            yield run(shard, tables)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    return write(folder / "a.h5", 4000, 256, 0.0), write(folder / "b.h5", 4000, 256, 0.01)


def test_results_are_written_down_bit_for_bit(pair: tuple[Path, Path]) -> None:
    with Tables() as tables:
        [result] = run(shards(*pair, 1)[0], tables)
    stats = result.by_phase[0]
    stats.largest = float("nan")
    again = decoded(json.loads(json.dumps(encoded(result))))
    assert isinstance(again, Direct)
    assert repr(again.by_phase[0].largest) == "nan"
    stats.largest = again.by_phase[0].largest = 0.1
    assert encoded(again) == encoded(result)
    np.testing.assert_array_equal(again.by_phase[0].histogram, stats.histogram)
    assert again.merge(Direct()).by_phase.keys() == {0}
    assert isinstance(again.by_phase[0], ErrorStats)


@pytest.mark.parametrize("stops", [0, 1, 7, 19])
def test_what_was_done_is_not_done_again(stops: int, pair: tuple[Path, Path], tmp_path: Path) -> None:
    work = shards(*pair, 20)
    inputs = {"TRAIN": (pair[0], ""), "INFER": (pair[1], "")}
    with Tables() as tables:
        expected = [encoded(one) for result in Local().run(work, tables) for one in result]
        first, second = Counting(stops), Counting()
        with Journal(tmp_path / "j", about(inputs)) as journal, pytest.raises(KeyboardInterrupt):
            list(Continued(first, journal, pair).run(work, tables))
        with Journal(tmp_path / "j", about(inputs)) as journal:
            assert journal.kept == stops
            results = list(Continued(second, journal, pair).run(work, tables))
        assert second.ran == len(work) - stops
        assert [encoded(one) for result in results for one in result] == expected


def test_holes_in_what_was_done_are_filled_in_order(pair: tuple[Path, Path], tmp_path: Path) -> None:
    work = shards(*pair, 12)
    with Tables() as tables, Journal(tmp_path / "j", about({})) as journal:
        expected = [encoded(one) for result in Local().run(work, tables) for one in result]
        list(Continued(Local(), journal, pair).run(work[3:5] + work[8:9], tables))
        counting = Counting()
        results = list(Continued(counting, journal, pair).run(work, tables))
        assert counting.ran == len(work) - 3
        assert [encoded(one) for result in results for one in result] == expected


def test_another_scale_or_limit_is_another_shard(pair: tuple[Path, Path], tmp_path: Path) -> None:
    from dataclasses import replace

    [shard] = shards(*pair, 1)
    job = shard.jobs[0]
    others = [
        replace(shard, jobs=(replace(job, limits=0.03),)),
        replace(shard, jobs=(replace(job, limits={0: 0.02}),)),
        replace(shard, jobs=(replace(job, scale=job.scale * 2),)),
        replace(shard, left=shard.right),
        replace(shard, phases=shard.phases + np.uint8(1)),
        replace(shard, routed=True),
    ]
    with Journal(tmp_path / "j", about({})) as journal:
        continued = Continued(Local(), journal, pair)
        assert len({continued._key(one) for one in [shard, *others]}) == 1 + len(others)


def _report(folder: Path, *more: str) -> tuple[int, Any, str]:
    out = folder / "report.json"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "hsprobe",
            "diff",
            "dump",
            "infer.h5",
            "--format",
            "json",
            "-o",
            str(out),
            *more,
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, json.loads(out.read_text()), done.stderr


@pytest.fixture
def audit(tmp_path: Path) -> Path:
    """A dump, off by one, and a capture."""
    specforge.write(tmp_path / "dump", read_reference(REFERENCE), [2, 5, 8])
    (tmp_path / "infer.h5").write_bytes(Path(str(files("hsprobe.data") / "right.h5")).read_bytes())
    return tmp_path


def test_a_second_run_says_how_much_was_done_and_reports_the_same(audit: Path) -> None:
    plain = _report(audit)
    first = _report(audit, "--journal", "audit.journal")
    second = _report(audit, "--journal", "audit.journal")
    assert plain[:2] == first[:2] == second[:2]
    assert plain[0] == 1
    assert "done before" not in first[2]
    assert "done before, from audit.journal" in second[2]


def test_changed_inputs_start_it_anew_and_say_so(audit: Path) -> None:
    _report(audit, "--journal", "audit.journal")
    os.utime(next((audit / "dump").rglob("*.ckpt")))
    said = _report(audit, "--journal", "audit.journal")[2]
    assert "is started anew: TRAIN changed since" in said
    assert "done before" not in said
    (audit / "infer.h5").touch()
    assert "is started anew: INFER changed since" in _report(audit, "--journal", "audit.journal")[2]
    said = _report(audit, "--journal", "audit.journal", "--train-layers", "1,4,7")[2]
    assert "is started anew: TRAIN changed since" in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_comparison_goes_on(number: signal.Signals, tmp_path: Path) -> None:
    """Shards are made small, and the run waits after twenty, so that there is a middle to stop in."""
    write(tmp_path / "a.h5", 20_000, 256, 0.0)
    write(tmp_path / "b.h5", 20_000, 256, 0.001)
    hold = tmp_path / "hold"
    hold.touch()
    program = (
        "import itertools, os, sys, time\n"
        "from functools import partial\n"
        "from hsprobe.cluster import processes\n"
        "from hsprobe.compare import direct\n"
        "from hsprobe.compare.shards import cut\n"
        "direct.cut = partial(cut, most=200_000)\n"
        "run, number = processes.run, itertools.count()\n"
        "def held(*given):\n"
        "    late = next(number) >= 20\n"
        "    while late and os.path.exists('hold'):\n"
        "        time.sleep(0.01)\n"
        "    return run(*given)\n"
        "processes.run = held\n"
        "from hsprobe.cli import main\n"
        "sys.exit(main('diff a.h5 b.h5 --workers 1 --journal j --format json -o out.json'.split()))\n"
    )
    running = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        # A test run in the background of a shell inherits an ignored SIGINT, which no person's Ctrl-C meets.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    journal = tmp_path / "j"
    while running.poll() is None and (not journal.exists() or journal.read_bytes().count(b"\n") < 10):
        time.sleep(0.01)
    assert running.poll() is None, "it was done before it could be stopped"
    os.kill(running.pid, number)
    hold.unlink()
    running.communicate()
    assert running.returncode not in (0, 1), "it came to its end"
    before = journal.read_bytes().count(b"\n")
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    assert "of this comparison done before" in done.stderr
    continued = json.loads((tmp_path / "out.json").read_text())
    assert journal.read_bytes().count(b"\n") > before
    journal.unlink()
    assert subprocess.run([sys.executable, "-c", program], cwd=tmp_path).returncode == done.returncode
    assert json.loads((tmp_path / "out.json").read_text()) == continued


def test_shards_of_the_whole_comparison_are_journalled(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "cut", partial(cut, most=1 << 20))
    command = ["diff", str(pair[0]), str(pair[1]), "--journal", str(tmp_path / "j")]
    code = main(command)
    size = (tmp_path / "j").stat().st_size
    assert main(command) == code
    assert (tmp_path / "j").stat().st_size == size
