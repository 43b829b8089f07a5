"""Pairs as they were published or reported, rebuilt as configs: what each version does with them.

A file holds both configs, the shapes that matter, where the pair is from, and for every version the depths
that are captured and the codes that are found. CK701 (no weights to look at) is left out.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from hsprobe.check.model import Severity
from hsprobe.check.run import check
from tests.check.models import some_map, write_model

FOLDER = Path(__file__).parent / "public"
PAIRS = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
CASES = [(name, version) for name, pair in PAIRS.items() for version in pair["verdicts"]]


def _tensors(pair: dict[str, Any]) -> dict[str, Any] | None:
    shapes: dict[str, Any] | None = pair.get("tensors")
    if shapes is not None and "d2t" in shapes:
        shapes = {**shapes, "d2t": some_map(shapes["d2t"][0], pair["target"]["vocab_size"])}
    return shapes


@pytest.mark.parametrize(("name", "version"), CASES)
def test_a_published_pair_gets_its_known_verdict(name: str, version: str, tmp_path: Path) -> None:
    pair = PAIRS[name]
    target = write_model(tmp_path / "target", pair["target"])
    draft = write_model(tmp_path / "draft", pair["draft"], _tensors(pair))
    report = check(target, draft, version=version, algorithm=pair.get("algorithm"))
    found: dict[str, list[str]] = {}
    for problem in report.problems:
        if problem.code != "CK701":
            found.setdefault(problem.severity.value, []).append(problem.code)
    depths = "final" if report.captured.final else report.captured.depths
    assert {"depths": depths, **found} == pair["verdicts"][version]


def test_every_pair_is_tried_in_three_versions() -> None:
    assert len(PAIRS) >= 20
    assert all(list(pair["verdicts"]) == ["0.5.9", "0.5.15.post1", "0.5.23"] for pair in PAIRS.values())
    assert all(pair["source"].startswith("https://github.com/") for pair in PAIRS.values())


def test_the_pairs_cover_good_and_bad() -> None:
    verdicts = [verdict for pair in PAIRS.values() for verdict in pair["verdicts"].values()]
    assert sum(Severity.ERROR.value not in verdict for verdict in verdicts) >= 20
    assert sum(Severity.ERROR.value in verdict for verdict in verdicts) >= 20
