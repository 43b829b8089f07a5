"""The table of id rules against the installed SGLang: its classes' own methods, run on minimal instances."""

from importlib.metadata import version
from typing import Any

import pytest

from hsprobe.formats.sglang_ids import Beyond, requested_depths, rule_of
from hsprobe.formats.sglang_models import FILES, by_class
from hsprobe.probes.sglang import SUPPORTED
from tests.formats.installed_setters import CASES, LAYERS, UNIMPORTABLE
from tests.installed import installed

VERSION = version("sglang")
# These store the ids of the layers after which they capture, not before which.
AFTER = {"muse_spark", "beam"}
NEWEST = SUPPORTED[-1]
NAMES = sorted(by_class())


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Any]:
    found: dict[str, Any] = installed("setters")
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_installed_class_does_what_the_table_says(name: str, outcomes: dict[str, Any]) -> None:
    found = outcomes[name]
    if found is None:
        assert VERSION != NEWEST, f"{name} is not there"
        assert rule_of(name, VERSION) is None, "the table has a rule for a class that is not there"
        pytest.skip(f"SGLang {VERSION} has no {name}")
    if isinstance(found, str) and found.startswith(UNIMPORTABLE) and VERSION != NEWEST:
        pytest.skip(found)
    assert isinstance(found, dict), f"{name} cannot be made: {found}"
    for algorithm in ("EAGLE3", "DFLASH"):
        rule = rule_of(name, VERSION, algorithm)
        if rule is None:
            works = any(isinstance(stored, list) for stored in found.get(algorithm, {}).values())
            assert not works, f"{name} has a method for {algorithm} that the table does not know"
            continue
        for case, stored in found[algorithm].items():
            ids = CASES[case]
            wanted = requested_depths(name, ids, LAYERS, VERSION, algorithm)
            _agrees(f"{name}, {algorithm}, {case} {ids}", by_class()[name].file, rule.beyond, wanted, stored)


def _agrees(what: str, file: str, beyond: Beyond, wanted: list[int], stored: list[int] | str) -> None:
    """What is stored is what is wanted, or the exception that the table announces for depths out of reach."""
    if isinstance(stored, str):
        assert beyond in (Beyond.INDEX_ERROR, Beyond.VALUE_ERROR), f"{what}: {stored}"
        assert stored == {Beyond.INDEX_ERROR: "IndexError", Beyond.VALUE_ERROR: "ValueError"}[beyond], what
        unsorted = wanted != sorted(wanted)
        assert unsorted or not all(0 < depth < LAYERS for depth in wanted), what
        return
    depths = [k + 1 for k in stored] if file in AFTER else stored
    reached = [d for d in sorted(set(wanted)) if d in depths or 0 <= d < LAYERS]
    assert depths == reached, what


def test_every_class_is_listed_once() -> None:
    assert len(NAMES) == sum(len(row.classes) for row in FILES)


def test_histories_ascend() -> None:
    for row in FILES:
        for history in (row.eagle3, row.dflash):
            assert [r.since for r in history] == sorted({r.since for r in history}), row.file
