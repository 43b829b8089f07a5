"""A server of a version that hsprobe does not know serves, and its trace says which probes are right."""

from pathlib import Path

import numpy as np
import pytest
import release
from future import VERSION
from serving import CAPTURE_SECONDS, Configuration, run_hsprobe
from started import plugin, started
from states import Phase, by_context, rows_of, worst_relative_error

from hsprobe.trace.reader import Trace

pytestmark = release.is_newest

FUTURE = Path(__file__).with_name("future.py").read_text()
DEPTHS = (2, 4, 6)


@pytest.fixture(scope="module")
def captured(kitchen, tmp_path_factory):
    """The server's log, and a trace."""
    folder = tmp_path_factory.mktemp("future")
    log, out = folder / "log", folder / "infer.h5"
    with started(kitchen, Configuration(), log, plugin(folder / "plugin", "future", FUTURE)) as port:
        done = run_hsprobe(
            "capture", "--server", f"http://127.0.0.1:{port}", "-o", out, "--prompts", kitchen.prompts(),
            "--max-new-tokens", "20", "--concurrency", "4", seconds=CAPTURE_SECONDS,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr + log.read_text()[-3000:]
    return log.read_text(), out


def test_it_says_at_start_what_is_supported_and_what_it_does_now(captured):
    log, _ = captured
    (line,) = {line.partition("hsprobe ")[2] for line in log.splitlines() if VERSION in line}
    assert "0.5.23" in line
    assert "newest" in line


def test_it_serves_what_it_would(kitchen, captured):
    _, out = captured
    with Trace.open(out) as trace, Trace.open(kitchen.reference("llama")) as alone:
        tokens = [[one.requests.tokens(i).tolist() for i in range(4)] for one in (trace, alone)]
    assert sorted(tokens[0]) == sorted(tokens[1])


def test_probes_that_see_something_else_are_disarmed_with_a_reason(captured):
    _, out = captured
    with Trace.open(out) as trace:
        shown = trace.provenance["self_test"]
        disarmed = {site: one["why"] for site, one in shown.items() if one["state"] == "disarmed"}
        gaps = {gap["site"]: gap["reason"] for gap in trace.gaps}
        sites = {tensor.site for tensor in trace.ranks[0].tensors.values()}
    assert set(disarmed) == {"layer", "mid"}
    assert "nothing came by for depth 0, 1, 2, 3, 4, 5, 6, 7" in disarmed["layer"]
    assert disarmed["mid"].startswith("at depth 0, it is not what the norm there was given")
    assert gaps == disarmed
    assert sites.isdisjoint(disarmed)


def test_the_others_are_right_and_say_so(kitchen, captured):
    _, out = captured
    with Trace.open(out) as trace:
        shown = trace.provenance["self_test"]
    proven = {site for site, one in shown.items() if one["state"] == "proven"}
    assert {"labels", "embed", "logits_processor.input", "draft.input", "draft.fc"} <= proven
    assert shown["aux"]["state"] == "unproven"
    states = [by_context(rows_of(kitchen.reference("llama"), f"layer/{depth:03d}")) for depth in DEPTHS]
    expected = {context: np.concatenate([state[context] for state in states]) for context in states[0]}
    error, count = worst_relative_error(rows_of(out, "aux"), expected, Phase.VERIFY)
    assert count >= 70
    assert error < 5e-6


def test_inspect_shows_it(captured):
    _, out = captured
    done = run_hsprobe("inspect", out)
    assert "disarmed mid: at depth 0" in " ".join(done.stdout.split())
