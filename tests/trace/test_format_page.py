"""`docs/trace-format.md` is true: its program reads a real trace, its names and codes are the code's."""

import re
from pathlib import Path

import h5py
import pytest

from hsprobe.trace import schema

PAGE = (Path(__file__).parents[2] / "docs" / "trace-format.md").read_text()


def test_the_program_reads_a_trace_with_plain_h5py(
    trace_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert "hsprobe" not in program
    trace_path.rename(trace_path.with_name("infer.h5"))
    monkeypatch.chdir(trace_path.parent)
    exec(compile(program, "trace-format.md", "exec"), {})
    first, second, _ = capsys.readouterr().out.splitlines()
    assert first.split()[:2] == ["token", "11"]
    assert first.endswith("[0. 1. 2. 3.]")
    assert second.split()[1] == "12"


def test_every_place_in_a_trace_is_on_the_page(trace_path: Path) -> None:
    names: set[str] = set()
    with h5py.File(trace_path) as file:
        names |= set(file.attrs)
        file.visititems(lambda name, item: names.update([*name.split("/"), *item.attrs]))
    words = set(re.findall(r"\w+", PAGE))
    assert {name for name in names if not name.isdigit()} <= words


@pytest.mark.parametrize(
    "codes", [schema.Model, schema.Phase, schema.CaptureMode, schema.RowStatus, schema.Launch]
)
def test_every_code_is_on_the_page(codes: type[schema.Phase]) -> None:
    for code in codes:
        assert f"{code.value} {code.name.replace('_', ' ').lower()}" in PAGE.lower()
