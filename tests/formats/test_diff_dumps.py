"""A dump as its producer wrote it, compared with a real server: right wiring passes, off by one is named."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from hsprobe.capture.prompts import load_prompts
from hsprobe.cli import main
from hsprobe.diagnose import diff
from hsprobe.diagnose.dumped import opened
from hsprobe.fixtures.dumps import baldeagle, plain, specforge
from hsprobe.fixtures.dumps.states import Request
from hsprobe.formats.dump import Options
from hsprobe.formats.registry import open_dump
from hsprobe.testing import DifferentError, assert_draft_sees
from hsprobe.trace.reader import Trace
from tests.formats.conftest import TRAINED

Write = Callable[[Path, Sequence[Request], Sequence[int]], None]
WRITERS: dict[str, tuple[Write, int]] = {
    "specforge": (specforge.write, 1),
    "specforge packed": (partial(specforge.write, compress=True), 1),
    "specforge-server": (specforge.write_server, 1),
    "baldeagle": (baldeagle.write, 0),
    "plain": (plain.write, 0),
    "plain npz": (plain.write_npz, 0),
}
each_format = pytest.mark.parametrize("name", WRITERS)


@each_format
def test_it_is_recognised(name: str, requests: list[Request], tmp_path: Path) -> None:
    WRITERS[name][0](tmp_path / "dump", requests, TRAINED)
    assert open_dump(tmp_path / "dump").key == name.split()[0]


@each_format
def test_the_right_wiring_passes(name: str, requests: list[Request], served: Path, tmp_path: Path) -> None:
    WRITERS[name][0](tmp_path / "dump", requests, TRAINED)
    report = diff(tmp_path / "dump", served)
    assert report.same, report.findings
    assert [line.trained for line in report.chunks] == list(TRAINED)
    assert report.coverage.matched >= 42


@each_format
def test_off_by_one_is_named_in_the_producers_own_numbers(
    name: str, requests: list[Request], served: Path, tmp_path: Path
) -> None:
    write, offset = WRITERS[name]
    write(tmp_path / "dump", requests, [depth - 1 for depth in TRAINED])
    report = diff(tmp_path / "dump", served)
    [finding] = [found for found in report.findings if found.name == "LAYER_SHIFT"]
    said = " ".join([finding.title, *finding.evidence])
    if name.startswith("plain"):
        assert "served depths 3, 6, 9, trained on 2, 5, 8" in said
        return
    assert f"trained on {[depth - 1 - offset for depth in TRAINED]}" in said
    assert f"served {[depth - offset for depth in TRAINED]}" in said


@pytest.mark.parametrize("flat", [False, True], ids=["groups", "end to end"])
@pytest.mark.parametrize("shift", [0, 1])
def test_foreign_hdf5(flat: bool, shift: int, requests: list[Request], served: Path, tmp_path: Path) -> None:
    depths = [depth - shift for depth in TRAINED]
    plain.write_hdf5(tmp_path / "dump.h5", requests, depths, flat=flat)
    report = diff(tmp_path / "dump.h5", served, dump=Options(maps=plain.FLAT if flat else plain.GROUPS))
    assert report.same == (not shift)
    assert [line.trained for line in report.chunks] == depths


class Recorded:
    """In place of a server, what a real one computed; keeps the prompts that it was sent."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace
        self.prompts: list[list[int]] = []

    def capture(self, out: Path, prompts: Path | str, *, max_new_tokens: int = 16) -> Path:
        self.prompts = [json.loads(line)["input_ids"] for line in Path(prompts).read_text().splitlines()]
        shutil.copy(self.trace, out)
        return out


def test_the_helper_for_tests_takes_a_dump(requests: list[Request], served: Path, tmp_path: Path) -> None:
    specforge.write(tmp_path / "dump", [requests[i % 2] for i in range(40)], TRAINED)
    server = Recorded(served)
    assert_draft_sees(tmp_path / "dump", server)
    assert server.prompts == [requests[i % 2].tokens.tolist() for i in range(32)]
    specforge.write(tmp_path / "off", requests, [depth - 1 for depth in TRAINED])
    with pytest.raises(DifferentError, match=r"trained\s+on \[1, 4, 7\], served \[2, 5, 8\]"):
        assert_draft_sees(tmp_path / "off", served)


def test_prompts_come_from_a_dump(requests: list[Request], tmp_path: Path) -> None:
    specforge.write(tmp_path / "dump", [requests[i % 2] for i in range(6)], TRAINED)
    prompts = load_prompts(tmp_path / "dump", 3)
    assert [prompt.input_ids for prompt in prompts] == [
        tuple(requests[i % 2].tokens.tolist()) for i in range(3)
    ]
    plain.write_hdf5(tmp_path / "x.h5", requests, TRAINED)
    assert len(load_prompts(tmp_path / "x.h5", None, Options(maps=plain.GROUPS))) == 2


def test_noise_is_measured_on_a_dump(
    requests: list[Request], served: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    specforge.write(tmp_path / "dump", requests, TRAINED)
    tolerance = str(tmp_path / "tolerance.json")
    assert (
        main(["noise", str(tmp_path / "dump"), str(served), "-o", tolerance, "--train-layers", "2,5,8"]) == 0
    )
    assert main(["diff", str(tmp_path / "dump"), str(served), "--noise", tolerance]) == 0
    assert "measured" in capsys.readouterr().out


def test_an_unknown_format_is_told_which_there_are(
    requests: list[Request], served: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    specforge.write(tmp_path / "dump", requests, TRAINED)
    assert main(["diff", str(tmp_path / "dump"), str(served), "--train-format", "nobody"]) == 2
    assert "Known are automodel, baldeagle, eagle" in capsys.readouterr().err
    assert main(["diff", str(served), str(served), "--train-layers", "1,2,3"]) == 2
    assert "is a trace, which itself says what it holds" in capsys.readouterr().err


def test_the_same_samples_are_not_read_twice_for_one_prompt(
    requests: list[Request], served: Path, tmp_path: Path
) -> None:
    """A dump of many: only what the capture can be compared with is read, and that is said."""
    others = [
        replace(
            request, tokens=torch.from_numpy(np.random.default_rng(n).integers(1, 250, len(request.tokens)))
        )
        for n in range(50)
        for request in requests
    ]
    specforge.write(tmp_path / "dump", [*others, *requests], TRAINED)
    with opened(tmp_path / "dump", beside=(trace := Trace.open(served))) as train:
        trace.close()
        assert len(train.requests) <= 4
        assert {"rows_0-2000/data_100.ckpt", "rows_0-2000/data_101.ckpt"} <= set(train.requests.ids)
        assert train.provenance["dump"]["samples"] == 102
