"""What the draft was trained on, from dumps as producers write them, against what will be captured."""

import json
import shutil
from pathlib import Path

import pytest

from hsprobe.cli import main
from hsprobe.fixtures.demo import BROKEN, TRAINED
from hsprobe.fixtures.dumps import specforge
from hsprobe.fixtures.dumps.states import read_reference

REFERENCE = Path(__file__).parents[1] / "formats" / "data" / "reference.h5"


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SpecForge's dump of depths 3, 6, 9, which does not say so."""
    folder = tmp_path_factory.mktemp("dump") / "hidden_states"
    specforge.write(folder, read_reference(REFERENCE), (3, 6, 9))
    return folder


def _check(capsys: pytest.CaptureFixture[str], draft: Path, *more: object) -> tuple[int, str]:
    words = ["check", "--target", TRAINED / "target", "--draft", draft, "--sglang", "0.5.23", *more]
    code = main([str(word) for word in words])
    return code, " ".join(capsys.readouterr().out.split())


def test_the_trained_pair_is_clean(capsys: pytest.CaptureFixture[str]) -> None:
    code, told = _check(capsys, TRAINED / "draft")
    assert code == 0
    assert told.startswith("OK 3 aux chunks will carry depths 3, 6, 9 (outputs of layers 2, 5, 8)")


def test_ids_in_the_producers_numbering_are_compared(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, told = _check(capsys, TRAINED / "draft", "--train", dump, "--train-layers", "2,5,8")
    assert (code, told[:2]) == (0, "OK")
    code, told = _check(capsys, TRAINED / "draft", "--train", dump, "--train-layers", "1,4,7")
    assert code == 1
    assert "trained on depths 2, 5, 8 (outputs of layers 1, 4, 7)" in told
    assert "[2, 5, 8] -> [1, 4, 7]" in told


def test_a_producers_default_only_warns(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, told = _check(capsys, TRAINED / "draft", "--train", dump)
    assert code == 0
    assert "takes depths 2, 5, 7 (outputs of layers 1, 4, 6) by default" in told
    assert _check(capsys, TRAINED / "draft", "--train", dump, "--strict")[0] == 1


def test_the_demos_broken_ids_are_named_without_a_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(TRAINED / "draft", draft)
    config = json.loads((draft / "config.json").read_text())
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = list(BROKEN)
    (draft / "config.json").write_text(json.dumps(config))
    code, told = _check(capsys, draft)
    assert code == 1
    assert told.startswith("FAIL id -1 puts the embedding output (depth 0) into chunk 0")
    assert "0 -1 0 (embedding)" in told
