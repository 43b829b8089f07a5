"""Every planted fault is named, and nothing else is."""

from pathlib import Path

import pytest

from hsprobe.diagnose import diff
from tests.diagnose.planted import BENIGN, CASES, PAIRS, SITES, Case

# What bfloat16's own rounding is of the size of: the fault is below the noise, and rightly not named.
_BELOW_NOISE: set[str] = set()


def _named(folder: Path, case: Case, dtype: str, sites: tuple[str, ...] = SITES) -> str:
    report = diff(*case.write(folder, dtype, sites))
    assert report.same == (not report.findings)
    return " ".join(sorted({finding.code for finding in report.findings}))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", [*CASES, *PAIRS, *BENIGN], ids=lambda case: case.name)
def test_what_was_planted_is_named_and_nothing_else(tmp_path: Path, case: Case, dtype: str) -> None:
    assert _named(tmp_path, case, dtype) == case.codes
