"""The writer's process: what is lost, and what goes on, when it or the server dies."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rig import Rig, bits, tensors

from hsprobe.probes.sglang.shared import DONE, Life, Shared
from hsprobe.probes.sglang.writer import IDLE_SECONDS, Writer
from hsprobe.trace.blocks import Expander
from hsprobe.trace.spool import SpoolReader, SpoolWriter

SERVER = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from rig import Rig
rig = Rig(Path(sys.argv[1]), 4)
rig.capture()
rig.arm()
rig.run(["a"], seed=0)
print(rig.writer(), flush=True)
for seed in range(1, 300):
    rig.run(["a", "b"], seed=seed)
    if seed == 150:
        os.kill(rig.writer(), signal.SIGSTOP)
rig.recorder.stage.flush()
print("done", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def until(what, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ended(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists() or "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()


def test_what_a_server_published_before_it_was_killed_is_written_and_its_writer_ends(tmp_path):
    command = [sys.executable, "-c", SERVER, str(tmp_path), str(Path(__file__).parent)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    writer = int(server.stdout.readline())
    assert server.stdout.readline() == "done\n"
    assert server.wait() == -signal.SIGKILL
    os.kill(writer, signal.SIGCONT)
    until(lambda: ended(writer))
    spool = SpoolReader(tmp_path / "rank-0.spool")
    expander = Expander()
    records = [one for record in spool for one in expander.expand(record)]
    assert not spool.torn
    assert [r.header["pass"] for r in records if r.kind == "pass"] == list(range(1, 301))
    generator = torch.Generator().manual_seed(299)
    assert torch.equal(
        bits(tensors(records, "layer/003")[-1]),
        torch.randn(4, 24, generator=generator).to(torch.bfloat16)[:2],
    )


def test_what_is_written_while_a_request_stands_still_is_told_apart_from_its_end(tmp_path):
    rig = Rig(tmp_path, 4)
    rig.ended = False
    rig.capture()
    rig.arm()
    rig.run(["a"])
    idle = [record for record in rig.records() if record.kind == "idle"]
    assert [record.header["running"] for record in idle] == [1]
    rig.ended = True
    until(lambda: list(SpoolReader(rig.spool))[-1].header.get("running") == 0)
    assert list(SpoolReader(rig.spool))[-1].kind == "idle"


def test_a_writer_that_dies_ends_the_recording_with_a_gap_and_the_server_goes_on(tmp_path):
    rig = Rig(tmp_path, 4, memory=4 << 10)
    rig.capture()
    rig.arm('{"on_pressure": "block"}')
    rig.run(["a"])
    rig.records()
    os.kill(rig.writer(), signal.SIGKILL)
    until(lambda: rig.recorder.stage.spooler.stopped)
    for seed in range(100):
        assert rig.run(["a", "b"], seed=seed)[0] == "graph"
    spool = tmp_path / "rank-0.spool"
    until(lambda: any(r.kind == "gap" for r in SpoolReader(spool)))
    until(lambda: list(SpoolReader(spool))[-1].kind == "idle")
    (gap,) = (r for r in SpoolReader(spool) if r.kind == "gap")
    assert "the process that writes the spool has ended" in gap.header["reason"]


def test_a_blocked_server_goes_on_when_its_writer_dies(tmp_path):
    rig = Rig(tmp_path, 4, memory=4 << 10)
    rig.capture()
    rig.arm('{"on_pressure": "block"}')
    rig.run(["a"])
    rig.records()
    writer = rig.writer()
    os.kill(writer, signal.SIGSTOP)
    killer = subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -KILL {writer}"])
    for seed in range(100):
        rig.run(["a", "b"], seed=seed)
    assert killer.wait() == 0
    assert rig.recorder.stage.spooler.stopped


@pytest.fixture
def pair(tmp_path):
    """Memory, and a writer of it in this process whose server is this process."""
    shared = Shared.create(1 << 12, 1 << 12)
    with SpoolWriter(tmp_path / "rank.spool") as spool:
        yield shared, Writer(shared, spool, 1 << 20, Life(os.getpid())), tmp_path / "rank.spool"


def test_bytes_that_the_device_has_not_copied_yet_are_waited_for(pair):
    shared, writer, path = pair
    shared.ring[:4] = b"late"
    shared.append((((3, 1),), 64, [("tensor", {"pass": 1}, ((0, 4),))]))
    shared.append(((), -1, [("gap", {"pass": 2}, ())]))
    assert not writer.write_batch(dead=False)
    assert not list(SpoolReader(path))
    shared.words[DONE + 3] = 1
    assert writer.write_batch(dead=False)
    writer.settle()
    assert [(r.kind, bytes(r.payload)) for r in SpoolReader(path)] == [("tensor", b"late"), ("gap", b"")]
    assert shared.at_rest


def test_copies_that_a_dead_server_had_not_finished_are_passed_over(pair):
    shared, writer, path = pair
    shared.append((((1, 0), (0, 7)), 64, [("tensor", {"pass": 1}, ((0, 4),))]))
    shared.append(((), 64, [("gap", {"pass": 2}, ())]))
    assert writer.write_batch(dead=True)
    writer.settle()
    assert [r.header["pass"] for r in SpoolReader(path)] == [2]


def test_a_journal_holds_entries_of_any_size_in_order_and_says_when_it_is_full():
    shared = Shared.create(1 << 10, 64)
    position, said, heard = 0, [], []
    for number in range(2000):
        entry = ((), number, [("gap", {"reason": "x" * (number * 37 % 400)}, ())])
        while not shared.append(entry):
            found = shared.read(position)
            assert found is not None
            position = found[1]
            heard.append(found[0])
            shared.release(position, found[0][1])
        said.append(entry)
    while (found := shared.read(position)) is not None:
        heard.append(found[0])
        position = found[1]
    assert heard == said
    with pytest.raises(ValueError, match="more than can be handed over"):
        shared.append(((), 0, [("gap", {"reason": "x" * 1000}, ())]))


def test_a_spool_is_not_at_rest_while_a_request_runs(tmp_path):
    rig = Rig(tmp_path, 4)
    rig.capture()
    rig.arm()
    rig.run(["a"])
    rig.records()
    written = (tmp_path / "rank-0.spool").stat().st_size
    rig.ended = False
    rig.run(["b"])
    until(lambda: (tmp_path / "rank-0.spool").stat().st_size > written)
    time.sleep(3 * IDLE_SECONDS)
    assert list(SpoolReader(tmp_path / "rank-0.spool"))[-1].kind == "blocks"
    rig.ended = True
    assert [r.header["rid"] for r in rig.records() if r.kind == "finished"] == ["a", "b"]
