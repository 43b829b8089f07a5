"""A dump as its producer wrote it, compared with a real server: right wiring passes, off by one is named."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from hsprobe.diagnose import diff
from hsprobe.fixtures.dumps import baldeagle, plain, specforge
from hsprobe.fixtures.dumps.states import Request
from hsprobe.formats.dump import Options
from hsprobe.formats.registry import open_dump
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
