"""What torch wrote is read as torch itself would, without torch, and nothing in it is ever executed."""

import gzip
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hsprobe.errors import HsprobeError
from hsprobe.formats.source import Source
from hsprobe.formats.stored import FileBytes, Stored

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.int32, torch.bool]
DTYPES += [torch.float8_e4m3fn, torch.uint16, torch.uint8]


def load(path: Path) -> Any:
    return Source(path.parent).load(path.name)


def bits(tensor: torch.Tensor) -> np.ndarray:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_are_those_that_torch_reads(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = (torch.arange(24) - 5).reshape(2, 3, 4).to(torch.float32).abs().to(dtype)
    torch.save({"x": tensor}, tmp_path / "x.pt")
    found = load(tmp_path / "x.pt")["x"]
    assert found.shape == (2, 3, 4)
    assert found.dtype == str(dtype).removeprefix("torch.")
    assert found.read().view(np.uint8).tobytes() == bits(torch.load(tmp_path / "x.pt")["x"]).tobytes()


def test_views_of_a_storage(tmp_path: Path) -> None:
    base = torch.arange(60, dtype=torch.float32).reshape(5, 12)
    views = {"part": base[2:4], "turned": base.T, "columns": base[:, 3:6], "again": base}
    torch.save(views, tmp_path / "x.pt")
    found = load(tmp_path / "x.pt")
    for name, view in views.items():
        assert np.array_equal(found[name].read(), view.numpy()), name
        assert np.array_equal(found[name].read(1, 2), view.numpy()[1:2]), name


def test_other_values_stay_what_they_are(tmp_path: Path) -> None:
    value = {
        "none": None,
        "list": [torch.zeros(2), "a", 1.5, True],
        "size": torch.zeros(2, 3).shape,
        "ordered": OrderedDict(a=1),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "id": "conversation 7",
        "large": 1 << 40,
    }
    torch.save(value, tmp_path / "x.pt")
    found = load(tmp_path / "x.pt")
    assert found["none"] is None
    assert found["list"][1:] == ["a", 1.5, True]
    assert found["size"] == (2, 3)
    assert found["ordered"] == {"a": 1}
    assert found["parameter"].read().tolist() == [1, 1]
    assert (found["id"], found["large"]) == ("conversation 7", 1 << 40)


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("pwned",)


@pytest.mark.parametrize("packed", [False, True])
def test_an_object_that_runs_code_is_not_run(
    packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / ("x.pt.gz" if packed else "x.pt")
    with gzip.open(path, "wb") if packed else path.open("wb") as file:
        torch.save({"evil": Evil(), "x": torch.ones(1)}, file)
    found = load(path)
    assert found["x"].read().tolist() == [1]
    assert not isinstance(found["evil"], Stored | int | str | None)
    assert not (tmp_path / "pwned").exists()


def test_a_file_from_before_torch_1_6(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    x = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    torch.save({"x": x}, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    assert load(tmp_path / "x.pt")["x"].read().tobytes() == bits(x).tobytes()
    torch.save({"x": Evil()}, tmp_path / "evil.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(HsprobeError, match="nothing but data"):
        load(tmp_path / "evil.pt")
    assert not (tmp_path / "pwned").exists()


def test_of_columns_of_a_wider_tensor_only_the_rows_asked_for_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ModelOpt's vLLM script stores: both tensors are views of one storage."""
    wide = torch.arange(400 * 64, dtype=torch.float32).reshape(400, 64)
    torch.save({"aux": wide[:, :48], "final": wide[:, 48:]}, tmp_path / "x.pt")
    found = load(tmp_path / "x.pt")
    assert not found["final"].dense
    asked: list[int] = []
    read = FileBytes.read

    def counted(self: FileBytes, offset: int, count: int) -> bytearray:
        asked.append(count)
        return read(self, offset, count)

    monkeypatch.setattr(FileBytes, "read", counted)
    assert np.array_equal(found["final"].read(7, 9), wide[7:9, 48:].numpy())
    assert sum(asked) < 3 * 64 * 4
