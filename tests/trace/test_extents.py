"""Reading tensors past HDF5: the same bits, and damage is seen as HDF5 sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsprobe.compare.cursor import Cursor, Layout
from hsprobe.errors import HsprobeError
from hsprobe.trace.checksum import Fletcher32
from hsprobe.trace.extents import extents
from hsprobe.trace.reader import Trace
from hsprobe.trace.tensor import Tensor
from tests.compare.test_shards import write


def _plainly(data: np.ndarray) -> tuple[int, int]:
    """Both sums, half-word by half-word."""
    first = second = 0
    for word in data.view(">u2").tolist():
        first = (first + word) % 65535
        second = (second + first) % 65535
    return first, second


@given(words=st.integers(0, 5000), seed=st.integers(0, 1 << 16), same=st.sampled_from([None, 0, 255]))
def test_the_checksum_is_the_one_defined(words: int, seed: int, same: int | None) -> None:
    data = np.random.default_rng(seed).integers(0, 256, 4 * words).astype(np.uint8)
    if same is not None:
        data[:] = same
    first, second = _plainly(data)
    stored = (second << 16 | first).to_bytes(4, "little")
    sums = Fletcher32()
    assert sums.matches(data, stored)
    if words:
        data[seed % len(data)] ^= 1
        assert not sums.matches(data, stored)


def _layouts() -> dict[str, dict[str, Any]]:
    return {
        "contiguous": {},
        "chunks": {"chunks": (80, 32)},
        "chunks with checksums": {"chunks": (80, 32), "fletcher32": True},
        "chunks that do not divide it": {"chunks": (77, 40), "fletcher32": True},
    }


@pytest.mark.parametrize("layout", _layouts().values(), ids=_layouts())
@pytest.mark.parametrize("dtype", ["<f4", "<u2", "<f2"])
def test_tiles_hold_what_hdf5_reads(layout: dict[str, Any], dtype: str, tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(1003, 96)).astype("<f4")
    values = values.astype(dtype) if dtype != "<u2" else values.view("<u2")[:, ::2].copy()
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("data", data=values, **layout)
    with h5py.File(tmp_path / "x.h5", "r") as file:
        found = extents(file["data"])
        assert found is not None
        buffer, sums = np.zeros(found.tile_bytes, np.uint8), Fletcher32()
        for row in range(-(-len(values) // found.rows)):
            for column in range(found.across):
                (low, high), (left, right) = found.bounds(row, column)
                tile = found.read(row, column, buffer, sums)
                assert tile is not None
                assert (tile == values[low:high, left:right]).all()


@pytest.mark.parametrize(
    "layout",
    [
        {"chunks": (80, 32), "compression": "gzip"},
        {"chunks": (80, 32), "shuffle": True},
        {"chunks": (1, 8)},
    ],
)
def test_what_is_packed_or_in_crumbs_is_left_to_hdf5(layout: dict[str, Any], tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("data", data=np.ones((100, 64), np.float32), **layout)
        assert extents(file["data"]) is None


def test_a_file_that_is_no_local_file_is_left_to_hdf5(tmp_path: Path) -> None:
    with h5py.File.in_memory() as file:
        file["data"] = np.ones((100, 64), np.float32)
        assert extents(file["data"]) is None


@pytest.fixture
def tensors(tmp_path: Path) -> Any:
    values = np.random.default_rng(3).normal(size=(900, 24)).astype(np.float32)
    write(tmp_path / "x.h5", values, "float32", 3)
    with Trace.open(tmp_path / "x.h5") as trace:
        yield values, [rank.tensors["aux"] for rank in trace.ranks], tmp_path / "x.h5"


@given(seed=st.integers(0, 1 << 16), count=st.integers(1, 60), run=st.booleans())
def test_a_cursor_reads_rows_in_any_order(seed: int, count: int, run: bool, reading: Any) -> None:
    values, cursor = reading
    rng = np.random.default_rng(seed)
    start = int(rng.integers(0, len(values) - count))
    rows = np.arange(start, start + count) if run else rng.integers(0, len(values), count)
    low, high = sorted(rng.choice(25, 2, replace=False).tolist())
    cursor.begin(rows.astype(np.int64))
    assert (cursor.columns((low, high)) == values[rows, low:high]).all()


@pytest.fixture(scope="module")
def reading(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("cursor") / "x.h5"
    values = np.random.default_rng(3).normal(size=(900, 24)).astype(np.float32)
    write(path, values, "float32", 3)
    with Trace.open(path) as trace:
        yield values, Cursor(Layout([rank.tensors["aux"] for rank in trace.ranks]))


def test_a_flipped_bit_is_an_error_and_no_wrong_number(
    tensors: tuple[np.ndarray, list[Tensor], Path],
) -> None:
    _, found, path = tensors
    held = found[0].extents
    assert held is not None
    with path.open("r+b") as file:
        file.seek(int(held._offsets[0, 0]) + 5)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 4]))
    cursor = Cursor(Layout(found))
    cursor.begin(np.arange(3))
    with pytest.raises(HsprobeError, match="its checksum does not match"):
        cursor.columns((0, 24))
    cursor.begin(np.arange(400, 403))
    cursor.columns((0, 24))
