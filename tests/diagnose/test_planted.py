"""Every planted fault is named, and nothing else is."""

from dataclasses import replace
from pathlib import Path

import pytest

from hsprobe.diagnose import diff
from tests.diagnose.planted import BENIGN, CASES, PAIRS, SITES, Case, at


def _named(folder: Path, case: Case, dtype: str, sites: tuple[str, ...] = SITES) -> str:
    report = diff(*case.write(folder, dtype, sites))
    assert report.same == (not report.findings)
    return " ".join(sorted({finding.code for finding in report.findings}))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", [*CASES, *PAIRS, *BENIGN], ids=lambda case: case.name)
def test_what_was_planted_is_named_and_nothing_else(tmp_path: Path, case: Case, dtype: str) -> None:
    assert _named(tmp_path, case, dtype) == case.codes


# Forms that need the stream within layers, and what is said without it.
_WITHOUT_MID = [
    case
    for case in [*CASES, *PAIRS]
    if "HS205" not in case.codes
    and case.name
    not in (
        "MLP output alone", "residual twice", "next attention added", "MLP twice", "MLP four times",
        "attention twice", "half of the MLP",
    )
]  # fmt: skip


@pytest.mark.parametrize("case", _WITHOUT_MID, ids=lambda case: case.name)
def test_most_need_no_stream_within_layers(tmp_path: Path, case: Case) -> None:
    assert _named(tmp_path, case, "float32", ("aux", "layer")) == case.codes


@pytest.mark.parametrize("name", ["MLP missing", "next attention added"])
def test_what_cannot_be_told_without_it_is_said_and_not_guessed(tmp_path: Path, name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    report = diff(*case.write(tmp_path, "float32", ("aux", "layer")))
    assert [finding.code for finding in report.findings] == ["HS599"]
    said = " ".join(report.findings[0].evidence)
    assert "HS205" in said
    assert "--sites aux,layer,mid" in said


@pytest.mark.parametrize("name", ["next layer", "final norm on all", "rows +1", "previous pass", "doubled"])
def test_a_loud_channel_and_a_sink_row_hide_nothing(tmp_path: Path, name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    world = {"loud": name != "final norm on all", "sink": True}
    case = replace(case, server={**case.server, **world}, dump={**case.dump, **world})
    assert _named(tmp_path, case, "float32") == case.codes


def test_a_rotation_is_described(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "a rotation")
    (finding,) = diff(*case.write(tmp_path, "float32")).findings
    assert "the channels are rotated or permuted" in " ".join(finding.evidence)


def test_one_layer_off_among_alike_neighbours_is_a_layer(tmp_path: Path) -> None:
    """Neighbours of cosine 0.99, where the error is as small as that of coarse weights."""
    world = {"shrink": 0.05}
    case = Case("", "HS101", made=[at(4), at(7), at(9)], server=world, dump=world)
    report = diff(*case.write(tmp_path, "float32"))
    assert [finding.code for finding in report.findings] == ["HS101"]
    assert all(line.error < 0.15 for line in report.chunks)
