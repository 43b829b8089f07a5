"""The JSON Schema of the reports: published, current, and strict."""

import io
import json
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from hsprobe.diagnose import Report, diff
from hsprobe.diagnose.consistency import consistency
from hsprobe.report import formats, schema
from hsprobe.report.cases import AnyReport
from tests.synthetic import Floats, World, prompts, write_infer, write_train

VALIDATOR = jsonschema.Draft202012Validator(schema.published())


def _document(report: AnyReport) -> Any:
    stream = io.StringIO()
    formats.write(report, "json", stream)
    return json.loads(stream.getvalue())


def test_the_published_schema_is_valid_and_current() -> None:
    jsonschema.Draft202012Validator.check_schema(schema.published())
    how = "run: python -m hsprobe.report.schema > hsprobe/report/schema/report.schema.json"
    assert schema.published() == schema.build(), how


def _nan(name: str, x: Floats) -> Floats:
    if name.startswith("aux"):
        x[:, :64] = np.nan
    return x


def _late(name: str, x: Floats) -> Floats:
    return np.roll(x, 1, axis=0) if name.startswith(("aux", "draft.input")) else x


def _louder(name: str, x: Floats) -> Floats:
    return x * np.float32(1.5) if name.startswith("layer/005") else x


def _drifted() -> World:
    requests = prompts()
    requests[1][20] = (requests[1][20] + 1) % 61
    return World(requests=requests)


FAULTS: dict[str, dict[str, Any]] = {
    "right": {},
    "other depths": {"depths": (2, 5, 7)},
    "order": {"depths": (8, 6, 3)},
    "one chunk less": {"depths": (3, 6)},
    "nan": {"spoil": _nan},
    "late rows": {"spoil": _late},
    "one depth": {"spoil": _louder},
    "other tokens": {"world": _drifted()},
    "other weights": {"world": World(seed=1)},
    "cached prefix": {"cached": 5},
    "no depths captured": {"depths": (0, 6, 8), "sites": ("aux",)},
    "decode alone": {"decode_depths": (2, 5, 7)},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_json_validates_whatever_is_wrong(fault: str, tmp_path: Path) -> None:
    depths = {"depths": (3, 6, 8)} | FAULTS[fault]
    infer = write_infer(tmp_path / "infer.h5", **depths)
    for train in (write_train(tmp_path / "t.h5", (3, 6, 8)), write_train(tmp_path / "a.h5", every=True)):
        VALIDATOR.validate(_document(diff(train, infer)))
    if fault != "no depths captured":
        VALIDATOR.validate(_document(consistency(infer)))


def test_the_schema_is_strict(good: Report) -> None:
    found = _document(good)
    for change in (
        {"verdict": "maybe"},
        {"surprise": 1},
        {"chunks": [found["chunks"][0] | {"error": "0.1"}]},
        {"schema_version": 2},
    ):
        assert not VALIDATOR.is_valid(found | change)
    del found["findings"]
    assert not VALIDATOR.is_valid(found)
