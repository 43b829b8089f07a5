"""Servers that fail to start, are interrupted, die, or were started by somebody else."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from serving import CAPTURE_SECONDS, Configuration, run_hsprobe
from started import plugin, started

from hsprobe.capture.client import answers_ok
from hsprobe.fixtures import cpu
from hsprobe.trace.place import directory_for_port
from hsprobe.trace.reader import Trace

LONG = "1500"


def processes_with(marker: str) -> list[int]:
    """Processes whose command line or environment names the marker, this one's own family left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                text = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if marker.encode() in text:
                found.append(int(entry.name))
    return found


def start_capture(
    kitchen,
    out: Path,
    prompts: Path,
    *options: str,
    marker: str,
    configuration: Configuration = Configuration(),  # noqa: B008
) -> subprocess.Popen:
    arguments = kitchen.server_arguments(configuration)
    command = [
        sys.executable,
        "-m",
        "hsprobe",
        "capture",
        "--server",
        "-o",
        str(out),
        "--prompts",
        str(prompts),
    ]
    return subprocess.Popen(
        [*command, *options, "--", *arguments],
        env={**cpu.environment(ranks=configuration.ranks), "HSPROBE_TEST_MARKER": marker},
        # A test run in the background of a shell inherits an ignored SIGINT, which no person's Ctrl-C meets.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_spool(folder: Path, n_bytes: int, pattern: str = "hsprobe-*/*.spool") -> Path:
    """The spool of a server that has recorded so much, and so is in the middle of its work."""
    deadline = time.monotonic() + CAPTURE_SECONDS
    while time.monotonic() < deadline:
        for spool in folder.glob(pattern):
            if spool.stat().st_size > n_bytes:
                return spool
        time.sleep(0.1)
    raise AssertionError("the server recorded nothing in time")


def test_server_that_fails_to_start_shows_the_end_of_its_log(kitchen, tmp_path):
    done = run_hsprobe(
        "capture", "--server", "-o", tmp_path / "infer.h5", "--prompts", kitchen.prompts(),
        "--", "--model-path", tmp_path / "no-such-model", *cpu.SERVER_ARGUMENTS,
        environment=cpu.environment(),
        seconds=CAPTURE_SECONDS,
    )  # fmt: skip
    assert done.returncode == 2
    assert "The server ended with" in done.stderr
    assert "no-such-model" in done.stderr
    assert "Traceback (most recent call last)" not in done.stderr.split("The end of its log")[0]
    assert not (tmp_path / "infer.h5").exists()


def test_ctrl_c_leaves_a_readable_trace_and_no_process(kitchen, tmp_path):
    out, marker = tmp_path / "infer.h5", f"ctrl-c-{os.getpid()}"
    capture = start_capture(kitchen, out, kitchen.prompts(), "--max-new-tokens", LONG, marker=marker)
    wait_for_spool(tmp_path, 6_000_000)
    capture.send_signal(signal.SIGINT)
    _, stderr = capture.communicate(timeout=CAPTURE_SECONDS)
    assert capture.returncode == 130, stderr
    assert "interrupted" in stderr
    assert processes_with(marker) == []
    with Trace.open(out) as trace:
        assert len(trace.ranks[0].tensors["aux"]) > 70
        # Requests this long wait for one another: the server had begun some of the four.
        assert 1 <= len(trace.requests.ids) <= 4
    assert list(tmp_path.glob("hsprobe-*")) == []


def test_killed_server_leaves_a_readable_trace_and_says_what_happened(kitchen, tmp_path):
    out, marker = tmp_path / "infer.h5", f"killed-{os.getpid()}"
    capture = start_capture(kitchen, out, kitchen.prompts(), "--max-new-tokens", LONG, marker=marker)
    spool = wait_for_spool(tmp_path, 6_000_000)
    os.kill(int(spool.stem.rpartition("-")[2]), signal.SIGKILL)
    stdout, stderr = capture.communicate(timeout=CAPTURE_SECONDS)
    assert capture.returncode == 2, stdout
    # 0.5.9 does not notice that its scheduler has gone, and would let requests wait for ever.
    said = ("The server ended with", "stopped answering", "ended in the middle of the capture")
    assert any(one in stderr for one in said), stderr
    with Trace.open(out) as trace:
        assert trace.state == "recovered"
        assert len(trace.ranks[0].tensors["layer/008"]) > 70
    assert processes_with(marker) == []


SABOTAGE = """
def install():
    from hsprobe.probes.sglang.layer import LayerProbe
    from hsprobe.probes.sglang.norms import NormProbe
    def fail(*_):
        raise RuntimeError("broken on purpose")
    LayerProbe._take = NormProbe._take = fail
"""


@pytest.fixture(scope="module")
def running_server(kitchen, tmp_path_factory):
    """A server that a user started with HSPROBE_CAPTURE=1, its probes at the layers broken on purpose."""
    folder = tmp_path_factory.mktemp("attached")
    sabotage = plugin(folder, "sabotage", SABOTAGE)
    with started(kitchen, Configuration(), folder / "log", sabotage) as port:
        yield f"http://127.0.0.1:{port}"


def attach(kitchen, url: str, out: Path) -> subprocess.CompletedProcess:
    return run_hsprobe(
        "capture", "--server", url, "-o", out, "--prompts", kitchen.prompts(), "--max-new-tokens", "8"
    )


def test_attached_captures_hold_their_own_requests_only(kitchen, running_server, tmp_path):
    first, second = tmp_path / "first.h5", tmp_path / "second.h5"
    for out in (first, second):
        done = attach(kitchen, running_server, out)
        assert done.returncode == 0, done.stderr
    assert answers_ok(f"{running_server}/health"), "an attached server is left running"
    with Trace.open(first) as one, Trace.open(second) as two:
        assert len(one.requests.ids) == len(two.requests.ids) == 4
        assert set(one.requests.ids).isdisjoint(two.requests.ids)
        assert one.provenance["model"] == two.provenance["model"]
        assert len(one.ranks[0].tensors["aux"]) > 0


def test_attached_server_records_nothing_between_captures(kitchen, running_server, tmp_path):
    assert attach(kitchen, running_server, tmp_path / "infer.h5").returncode == 0
    spools = list(directory_for_port(int(running_server.rpartition(":")[2])).glob("*.spool"))
    before = [spool.stat().st_size for spool in spools]
    body = json.dumps({"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4, "temperature": 0}})
    subprocess.run(
        [
            "curl",
            "-sS",
            "--fail",
            f"{running_server}/generate",
            "-H",
            "Content-Type: application/json",
            "-d",
            body,
        ],
        check=True,
        timeout=60,
    )
    time.sleep(1)
    assert [spool.stat().st_size for spool in spools] == before


def test_failing_probe_is_disarmed_and_noted_and_the_server_goes_on(kitchen, running_server, tmp_path):
    out = tmp_path / "infer.h5"
    done = attach(kitchen, running_server, out)
    assert done.returncode == 0, done.stderr
    with Trace.open(out) as trace:
        tensors = trace.ranks[0].tensors
        assert not any(name.startswith(("layer/", "mid/")) for name in tensors)
        assert len(tensors["aux"]) > 0
        reasons = [gap["reason"] for gap in trace.gaps if gap["site"] == "layer"]
        assert any("broken on purpose" in reason for reason in reasons)


def test_address_without_a_server_or_without_probes_is_one_clear_sentence(kitchen, tmp_path):
    done = attach(kitchen, "http://127.0.0.1:9", tmp_path / "infer.h5")
    assert done.returncode == 2
    assert done.stderr.strip().count("\n") == 0
    assert "No healthy server answers" in done.stderr
