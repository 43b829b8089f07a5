"""docs/formats.md names every format, and its commands run."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from hsprobe.cli import main
from hsprobe.diagnose.registry import catalogue
from hsprobe.fixtures.dumps import plain, specforge
from hsprobe.fixtures.dumps.states import Request
from hsprobe.formats.registry import formats
from tests.formats.conftest import TRAINED

PAGE = (Path(__file__).parents[2] / "docs/formats.md").read_text()


def test_every_format_stands_in_the_table() -> None:
    assert sorted(re.findall(r"^\| `([a-z][a-z-]*)` \|", PAGE, re.MULTILINE)) == sorted(formats())


def test_the_codes_are_those_of_the_faults() -> None:
    known = {explanation.code for explanation in catalogue()}
    codes = re.findall(r"HS\d{3}", PAGE)
    assert codes
    assert set(codes) <= known


def test_the_commands_run(
    requests: list[Request], served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specforge.write(tmp_path / "hidden_states", requests, TRAINED)
    plain.write_hdf5(tmp_path / "foreign.h5", requests, TRAINED)
    shutil.copy(served, tmp_path / "infer.h5")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    commands = [line[2:] for block in blocks for line in block.splitlines()]
    assert len(commands) >= 4
    for command in commands:
        words = shlex.split(command)
        assert words[0] == "hsprobe"
        assert main(words[1:]) == 0, command
    assert (tmp_path / "converted.h5").is_file()
