"""What the rules say of a draft's tensors, against the installed SGLang's own class loading them."""

from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from hsprobe.check.layout import canonical, expected, fused
from hsprobe.check.model import CheckReport
from hsprobe.check.run import check
from hsprobe.check.setup import Setup, prepare
from tests.check.draft_cases import CASES
from tests.check.models import TARGET, write_model
from tests.installed import installed

VERSION = version("sglang")
STOPS = {"no draft_vocab_size", "fc transposed", "narrow fc", "short head"}
"""Cases in which the class or its loading raises an error."""


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[str, Any]]:
    """Name of the case -> what SGLang's class did."""
    return dict(zip(CASES, installed("drafts"), strict=True))


def _report(name: str, folder: Path) -> CheckReport:
    config, tensors = CASES[name]
    write_model(folder / "target", TARGET)
    write_model(folder / "draft", config, tensors)
    return check(folder / "target", folder / "draft", version=VERSION)


def _plain(name: str) -> str:
    return fused(name.removeprefix("model."))


@pytest.mark.parametrize("name", CASES)
def test_the_class_stops_exactly_where_a_rule_says_so(
    name: str, outcomes: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    codes = {problem.code for problem in _report(name, tmp_path).problems}
    error = outcomes[name].get("error", "")
    assert ("AttributeError" in error and "draft_vocab_size" in error) == ("CK407" in codes), error
    if "CK407" not in codes:
        assert bool(error) == ("CK706" in codes), error


@pytest.mark.parametrize("name", [name for name in CASES if name != "no draft_vocab_size"])
def test_the_class_has_the_parameters_that_the_layout_says(
    name: str, outcomes: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    _report(name, tmp_path)
    setup = _setup(tmp_path)
    layout = expected(setup)
    shapes = {_plain(parameter): sizes for parameter, sizes in outcomes[name]["parameters"].items()}
    assert {_plain(tensor) for tensor in layout} == set(shapes)
    for tensor, one in layout.items():
        # Fused parameters hold several tensors, vocabularies are padded to a multiple of 64.
        if (
            one.shape is not None
            and fused(tensor) == tensor
            and "embed" not in tensor
            and "head" not in tensor
        ):
            assert list(one.shape) == shapes[tensor], tensor


@pytest.mark.parametrize("name", [name for name in CASES if name not in STOPS])
def test_what_is_not_loaded_is_what_the_rules_name(
    name: str, outcomes: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    found = outcomes[name]
    assert "error" not in found, found["error"]
    problems = {problem.code: problem.text for problem in _report(name, tmp_path).problems}
    setup = _setup(tmp_path)
    held = {_plain(canonical(setup, tensor)) for tensor in setup.draft_weights.named}
    part = {name for name, one in expected(setup).items() if name not in held and _plain(name) != name}
    part = {_plain(name) for name in part if canonical(setup, name) not in _held(setup)}
    missing = {_plain(tensor) for tensor in expected(setup)} - held | part
    unloaded = {_plain(p) for p in found["parameters"]} - {_plain(p) for p in found["loaded"]}
    assert unloaded == missing
    # The embedding comes from the target, the head too where the draft has no vocabulary of its own.
    shared = {"embed_tokens.weight"}
    if CASES[name][0]["draft_vocab_size"] is None:
        shared.add("lm_head.weight")
    told = " ".join(problems.get(code, "") for code in ("CK601", "CK602", "CK703"))
    for parameter in unloaded - shared:
        assert any(word in told for word in (parameter, parameter.split(".")[0], "v_proj")), (parameter, told)
    assert ("CK703" in problems) <= bool(unloaded - shared)


def _setup(folder: Path) -> Setup:
    return prepare(
        folder / "target", folder / "draft", train=None, dump=None, version=VERSION, algorithm="EAGLE3"
    )


def _held(setup: Setup) -> set[str]:
    return {canonical(setup, tensor) for tensor in setup.draft_weights.named}


def test_names_in_the_file_are_those_that_the_class_takes(
    outcomes: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    _report("named model.", tmp_path)
    setup = _setup(tmp_path)
    names = {_plain(canonical(setup, name)) for name in CASES["named model."][1]} - {"d2t", "t2d"}
    assert names == {_plain(parameter) for parameter in outcomes["named model."]["loaded"]}
    assert outcomes["named model."]["map"]
