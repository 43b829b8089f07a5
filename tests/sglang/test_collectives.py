"""Recording adds no collective to the served path: two ranks, counted at rest and while they record.

A sum that SGLang itself leaves for later is not completed for the record's sake either; it is a gap.
"""

import json
import os
from collections import defaultdict
from pathlib import Path

import pytest
import release
from counting import FOLDER
from serving import CAPTURE_SECONDS, Configuration, run_hsprobe
from started import plugin, started

from hsprobe.capture.client import generate
from hsprobe.capture.prompts import load_prompts
from hsprobe.trace.reader import Trace

pytestmark = release.counts_requests

LAYERS = 8
TOKENS = 20
# A prompt that was served before is computed again.
SERVED = Configuration(tp=2, arguments=("--disable-radix-cache",))
COUNTING = Path(__file__).with_name("counting.py").read_text()
OWED = 5
# What 0.5.23 never does, and a later one may: a stage that does not complete the sum that it was handed.
PENDING = f"""
def install():
    from hsprobe.probes.sglang.layer import LayerProbe
    prepared = LayerProbe._prepared
    def owing(self, result, boundary, hidden, batch, *args, **kwargs):
        if self._place_of.get(id(boundary)) == ("layer", {OWED}):
            batch.residual_stream.pending = object()
        prepared(self, result, boundary, hidden, batch, *args, **kwargs)
        if batch.residual_stream is not None:
            batch.residual_stream.pending = None
    LayerProbe._prepared = owing
"""

PLUGINS = {"counting": COUNTING, "pending": PENDING}


def batches(folder: Path) -> list[list[dict]]:
    """Of each process, in order of their numbers."""
    files = sorted(folder.glob("*.jsonl"))
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def by_kind(lines: list[dict]) -> dict[tuple, list[dict]]:
    found = defaultdict(list)
    for line in lines:
        found[line["mode"], line["requests"], line["rows"]].append(line["calls"])
    return found


@pytest.fixture(scope="module")
def counted(kitchen, tmp_path_factory):
    """Batches of each rank at rest, and while every site records; and the trace."""
    folder = tmp_path_factory.mktemp("collectives")
    (folder / "calls").mkdir()
    plugins = [plugin(folder / name, name, source) for name, source in PLUGINS.items()]
    environment = {FOLDER: str(folder / "calls")}
    with started(kitchen, SERVED, folder / "log", os.pathsep.join(plugins), **environment) as port:
        url = f"http://127.0.0.1:{port}"
        for number, prompt in enumerate(load_prompts(kitchen.prompts())):
            generate(url, f"at-rest-{number}", prompt, TOKENS)
        rest = batches(folder / "calls")
        done = run_hsprobe(
            "capture", "--server", url, "-o", folder / "infer.h5", "--prompts", kitchen.prompts(),
            "--max-new-tokens", str(TOKENS), "--concurrency", "1", seconds=CAPTURE_SECONDS,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        both = batches(folder / "calls")
    armed = [lines[len(before) :] for lines, before in zip(both, rest, strict=True)]
    return rest, armed, folder / "infer.h5"


def test_both_ranks_were_recorded_at_every_depth(counted):
    _, _, trace = counted
    with Trace.open(trace) as found:
        assert [rank.coords["tp"] for rank in found.ranks] == [0, 1]
        for rank in found.ranks:
            depths = {tensor.depth for tensor in rank.tensors.values() if tensor.site == "layer"}
            assert depths == {*range(LAYERS + 1)} - ({OWED} if release.NEWER else set())


@release.is_newest
def test_a_sum_that_is_left_for_later_is_a_gap_that_says_so(counted):
    _, _, trace = counted
    with Trace.open(trace) as found:
        assert found.gaps != []
        assert {gap["site"] for gap in found.gaps} == {"layer"}
        assert all(gap["reason"].startswith("not reduced: ") for gap in found.gaps)


def test_recording_adds_no_collective_to_a_batch(counted):
    rest, armed, _ = counted
    assert len(rest) == len(armed) == 2
    for before, during in zip(map(by_kind, rest), map(by_kind, armed), strict=True):
        kinds = before.keys() & during.keys()
        assert {"EXTEND", "DECODE"} <= {mode for mode, _, _ in kinds}
        for kind in kinds:
            usual = before[kind][0]
            # Attention and MLP of every layer, at least.
            assert usual["all_reduce"] >= 2 * LAYERS
            assert before[kind] == [usual] * len(before[kind]), kind
            assert during[kind] == [usual] * len(during[kind]), kind
