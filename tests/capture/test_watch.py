"""`hsprobe watch` on the spools of a server: the passes of a real one, from its trace, played again."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from played import Server

from hsprobe.capture.watch import Reference, Watch
from hsprobe.cli import main
from hsprobe.trace.reader import Trace
from hsprobe.trace.schema import Model, Phase

DATA = files("hsprobe.data")
TRAIN = Path(str(DATA / "train.h5"))


def _play(server: Server, name: str) -> Iterator[int]:
    """Play the target's passes of a shipped trace again, and yield the number of each."""
    with Trace.open(Path(str(DATA / name))) as trace:
        rank = trace.ranks[0]
        aux = rank.tensors["aux"]
        data, of_row = aux.read(), rank.rows["pass"][aux.row_index]
        for index in np.flatnonzero(rank.passes["model"] == int(Model.TARGET)).tolist():
            mine = np.flatnonzero(of_row == index)
            at = aux.row_index[mine]
            rows = {}
            for request in dict.fromkeys(rank.rows["request"][at].tolist()):
                here = at[rank.rows["request"][at] == request]
                positions = rank.rows["position"][here].tolist()
                rows[f"r{request}"] = (positions, rank.rows["token"][here].tolist())
            phase = Phase(rank.passes["phase"][index]).name.lower()
            number = server.run(phase, rows, tensor=None)
            server.tensor(number, data[mine], name="aux", site="aux", depth=None, chunks=3)
            yield number


def _errors(folder: Path) -> dict[str, float]:
    with Trace.open(TRAIN) as trace:
        tally = Watch(folder, Reference(trace)).read()
    return {name: site.errors.median for name, site in tally.sites.items()}


@pytest.mark.parametrize(("name", "low", "high"), [("right.h5", 0.001, 0.02), ("broken.h5", 0.8, 1.2)])
def test_errors_so_far_are_those_that_the_diff_finds(
    name: str, low: float, high: float, tmp_path: Path
) -> None:
    server = Server(tmp_path / "rank.spool")
    list(_play(server, name))
    server.stop()
    errors = _errors(tmp_path)
    assert list(errors) == ["aux chunk 0", "aux chunk 1", "aux chunk 2"]
    assert low < errors["aux chunk 0"] < high
    assert errors["aux chunk 1"] < 0.02


def test_it_reads_on_where_it_left_off(tmp_path: Path) -> None:
    server = Server(tmp_path / "rank.spool")
    watch = Watch(tmp_path)
    seen = []
    for _ in _play(server, "right.h5"):
        server.spool.flush()
        seen.append(sum(watch.read().passes.values()))
    assert seen == list(range(1, len(seen) + 1))
    assert not watch.tally.ended
    server.spool.append("bye", {})
    server.spool.flush()
    assert watch.read().ended
    with Trace.open(Path(str(DATA / "right.h5"))) as trace:
        assert watch.tally.sites["aux chunk 0"].rows == trace.ranks[0].tensors["aux"].shape[0]
    assert len(watch.tally.requests) == 2


def test_a_server_that_was_killed_has_ended(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    server = Server(tmp_path / f"tp0-{gone.pid}.spool")
    server.run("prefill", {"a": (0, [1, 2, 3])})
    server.spool.flush()
    assert Watch(tmp_path).read().ended


def test_acceptance_is_the_tokens_that_a_verify_block_commits(tmp_path: Path) -> None:
    server = Server(tmp_path / "rank.spool")
    server.run("prefill", {"a": (0, [1, 2, 3])})
    server.run("verify", {"a": (3, [4, 5, 6, 7])})
    server.run("verify", {"a": (7, [8, 9, 10, 11])})
    server.run("verify", {"a": (9, [20, 21, 22, 23])})
    server.spool.flush()
    watch = Watch(tmp_path)
    # 4 and 2; what becomes of the last block is not known yet.
    assert watch.read().acceptance == 3.0


def test_gaps_are_counted_by_reason(tmp_path: Path) -> None:
    server = Server(tmp_path / "rank.spool")
    for _ in range(3):
        server.spool.append("gap", {"pass": 1, "site": "aux", "reason": "inside a CUDA graph"})
    server.spool.append("pass", {"pass": "nonsense"})
    server.spool.flush()
    tally = Watch(tmp_path).read()
    assert tally.gaps["inside a CUDA graph"] == 3
    assert sum(tally.gaps.values()) == 4


def test_once_shows_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = Server(tmp_path / "rank.spool")
    list(_play(server, "broken.h5"))
    server.stop()
    assert main(["watch", str(tmp_path), "--once", "--against", str(TRAIN)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"target +verify +\d+ +\d+", shown)
    assert re.search(r"aux chunk 0 +\d+ +\d+ +0\.9\d", shown)
    assert re.search(r"largest median error 0\.9\d at aux chunk 0", " ".join(shown.split()))


def test_it_follows_until_the_server_says_goodbye(tmp_path: Path) -> None:
    server = Server(tmp_path / "rank.spool")
    server.spool.flush()
    command = [sys.executable, "-m", "hsprobe", "watch", str(tmp_path), "--every", "0.05"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        try:
            first = watching.stdout.readline()
            list(_play(server, "right.h5"))
            server.spool.append("bye", {})
            server.spool.close()
            rest = watching.stdout.read()
            assert watching.wait(30) == 0
        finally:
            with suppress(ProcessLookupError):
                watching.kill()
    assert first.startswith("0 passes")
    assert "acceptance" in rest
    assert "aux chunk 2" in rest


def test_a_folder_that_is_not_there_is_trouble(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(tmp_path / "none")]) == 2
    assert main(["watch", "http://127.0.0.1:1"]) == 2
    assert "HSPROBE_CAPTURE=1" in capsys.readouterr().err
