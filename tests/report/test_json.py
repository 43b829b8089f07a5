"""The report as JSON."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsprobe.diagnose import Report, diff
from hsprobe.report import json as report_json
from tests.synthetic import Floats, write_infer


def _loaded(report: Report) -> Any:
    """Parse strictly: NaN and Infinity are refused."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    stream = io.StringIO()
    report_json.write(report, stream)
    return json.loads(stream.getvalue(), parse_constant=refuse)


def test_it_says_the_same_as_the_report(bad: Report) -> None:
    found = _loaded(bad)
    assert found["schema_version"] == 1
    assert found["verdict"] == "different"
    (finding,) = found["findings"]
    assert finding["code"] == "HS102"
    assert finding["title"] == bad.findings[0].title
    assert finding["mend"]["change"] == bad.findings[0].mend.change
    assert [chunk["served"] for chunk in found["chunks"]] == [0, 3, 6]
    assert [chunk["trained"] for chunk in found["chunks"]] == [3, 6, 8]
    assert found["chunks"][0]["state"] == "wrong depth"
    assert [p["phase"] for p in found["chunks"][0]["phases"]] == ["prefill", "decode", "verify"]
    assert found["coverage"]["matched"] == bad.coverage.matched
    assert found["coverage"]["share"] == pytest.approx(bad.coverage.matched / 162)
    assert found["coverage"]["drifts"][0]["position"] == 20


def test_an_all_clear(good: Report) -> None:
    found = _loaded(good)
    assert found["verdict"] == "same"
    assert found["findings"] == []


def test_a_figure_that_does_not_exist_is_null(folder: Path, good: Report) -> None:
    def gone(name: str, x: Floats) -> Floats:
        if name.startswith("aux"):
            x[:, :64] = np.nan
        return x

    report = diff(folder / "train.h5", write_infer(folder / "gone.h5", (3, 6, 8), spoil=gone))
    found = _loaded(report)
    assert found["chunks"][0]["error"] is None
    assert found["chunks"][1]["error"] < 1e-5
