"""Whatever is opened as a trace, the answer is a trace or one clear `HsprobeError`, never anything else."""

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hsprobe.errors import HsprobeError
from hsprobe.trace.reader import Trace
from hsprobe.trace.spool import SpoolWriter
from hsprobe.trace.writer import TraceWriter

many = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)


def read_everything(path: Path) -> None:
    with Trace.open(path) as trace:
        for rank in trace.ranks:
            for tensor in rank.tensors.values():
                assert len(tensor.row_index) == len(tensor)
                tensor.read()
                for chunk in range(tensor.chunks or 0):
                    tensor.read(slice(0, 1), chunk)
        for request in range(len(trace.requests)):
            trace.requests.tokens(request)


def the_error(path: Path) -> HsprobeError:
    with pytest.raises(HsprobeError) as caught:
        read_everything(path)
    assert str(path) in caught.value.what
    for sentence in (caught.value.what, caught.value.fix):
        assert sentence.endswith(".")
        assert "\n" not in sentence
    return caught.value


def test_a_missing_file(tmp_path: Path) -> None:
    assert "There is no file" in the_error(tmp_path / "none.h5").what


def test_a_folder(tmp_path: Path) -> None:
    assert "is a folder" in the_error(tmp_path).what


def test_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in the_error(tmp_path / "pipe").what


def test_a_path_through_a_file(trace_path: Path) -> None:
    assert "Not a directory" in the_error(trace_path / "x").what


def test_a_text_file(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    path.write_text("loss: 1.1\n")
    assert "not an HDF5 file" in the_error(path).what


def test_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    path.touch()
    assert "is empty" in the_error(path).what


def test_a_spool(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    with SpoolWriter(path) as spool:
        spool.append("hello", {})
    assert "is the spool of one server process" in the_error(path).what


def test_a_foreign_hdf5_file(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["hidden_states"] = np.zeros(3)
    assert "not a trace of hsprobe" in the_error(path).what


def test_a_file_cut_short(trace_path: Path) -> None:
    trace_path.write_bytes(trace_path.read_bytes()[:-1])
    assert "cut short" in the_error(trace_path).what


def test_a_file_under_its_partial_name(trace_path: Path) -> None:
    partial = trace_path.with_name("sample.h5.partial")
    trace_path.rename(partial)
    error = the_error(partial)
    assert "half-written" in error.what
    assert "capture again" in error.fix


def test_a_renamed_file_that_was_never_closed(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    with TraceWriter(path, {}) as writer:
        shutil.copy(writer.partial, tmp_path / "copy.h5")
        assert "half-written" in the_error(tmp_path / "copy.h5").what


Change = Callable[[h5py.File], None]


def attribute(name: str, value: object, at: str = "/") -> Change:
    def change(file: h5py.File) -> None:
        file[at].attrs[name] = np.bytes_(value) if isinstance(value, str) else value

    return change


def replaced(name: str, value: object) -> Change:
    def change(file: h5py.File) -> None:
        del file[name]
        file.create_dataset(name, data=np.bytes_(value) if isinstance(value, str) else value)

    return change


def without(name: str) -> Change:
    def change(file: h5py.File) -> None:
        del file[name]

    return change


def linked(name: str, link: object) -> Change:
    def change(file: h5py.File) -> None:
        del file[name]
        file[name] = link

    return change


def looped(file: h5py.File) -> None:
    file["ranks/0/tensors/loop"] = file["ranks/0/tensors"]


def widely_looped(file: h5py.File) -> None:
    for n in range(200):
        file[f"ranks/0/tensors/loop{n}"] = file["ranks/0/tensors"]


def claiming(shape: tuple[int, ...], name: str = "ranks/0/tensors/aux/data") -> Change:
    def change(file: h5py.File) -> None:
        dtype = file[name].dtype
        del file[name]
        file.create_dataset(name, shape=shape, dtype=dtype, chunks=(1,) * len(shape))

    return change


def elsewhere(file: h5py.File) -> None:
    del file["ranks/0/tensors/aux/data"]
    file.create_dataset(
        "ranks/0/tensors/aux/data", shape=(7, 6), dtype="<u2", external=[("/etc/passwd", 0, 84)]
    )


def virtual(file: h5py.File) -> None:
    del file["ranks/0/tensors/aux/data"]
    layout = h5py.VirtualLayout((7, 6), "<u2")
    layout[:] = h5py.VirtualSource("other.h5", "data", (7, 6))
    file.create_virtual_dataset("ranks/0/tensors/aux/data", layout)


ROWS, AUX = "ranks/0/rows", "ranks/0/tensors/aux"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (attribute("schema_version", 2), "has trace schema 2, and this hsprobe reads up to 1"),
        (attribute("schema_version", "one"), "not a version number"),
        (attribute("schema_version", -1), "not a version number"),
        (attribute("format", "other"), "not a trace of hsprobe"),
        (attribute("format", np.arange(3)), "not a trace of hsprobe"),
        (attribute("state", "writing"), "half-written"),
        (attribute("state", "odd"), "neither complete nor recovered"),
        (without("provenance"), "/provenance: it is missing"),
        (without("ranks"), "/ranks: it is missing"),
        (without("requests/token"), "/requests/token: it is missing"),
        (without(f"{ROWS}/context"), "/ranks/0/rows/context: it is missing"),
        (without(f"{AUX}/row"), "/row: it is missing"),
        (replaced("provenance", "{"), "not JSON"),
        (replaced("provenance", "[" * 100_000), "not JSON"),
        (replaced("provenance", "[]"), "not a JSON object"),
        (replaced("provenance", np.bytes_(b"\xff\xfe")), "bytes make no sense"),
        (replaced("provenance", 5), "not text"),
        (replaced("provenance", h5py.Empty("f")), "/provenance"),
        (replaced("gaps", "{}"), "not a JSON list"),
        (replaced("gaps", "[1]"), "not a JSON list"),
        (replaced("requests/offset", [0, 3, 6]), "do not fit together"),
        (replaced("requests/offset", [0, 9, 7]), "do not fit together"),
        (replaced("requests/offset", np.zeros(0, np.int64)), "do not fit together"),
        (replaced("requests/prompt_len", [3, 5]), "do not fit together"),
        (replaced("requests/prompt_len", [3]), "do not fit together"),
        (replaced("requests/token", np.zeros(7, np.float32)), "holds float32, not int64"),
        (replaced(f"{ROWS}/pass", [0, 0, 0, 0, 0, 0, 2]), "outside 0..1"),
        (replaced(f"{ROWS}/pass", [0, 0, 0, 0, 0, 0, -1]), "outside 0..1"),
        (replaced(f"{ROWS}/request", [0, 0, 0, 0, 0, 0, 2]), "outside -1..1"),
        (replaced(f"{ROWS}/status", np.full(7, 5, np.uint8)), "outside 0..4"),
        (replaced(f"{ROWS}/token", [1, 2]), "differ in length"),
        (replaced(f"{ROWS}/token", np.zeros((7, 1), np.int64)), "2 axes, not 1"),
        (replaced("ranks/0/passes/phase", np.array([9, 0], np.uint8)), "outside 0..4"),
        (replaced("ranks/0/passes/model", np.array([2, 0], np.uint8)), "outside 0..1"),
        (replaced("ranks/0/passes/mode", np.array([3, 0], np.uint8)), "outside 0..2"),
        (replaced(f"{AUX}/row", [0, 1, 2, 3, 4, 5, 7]), "outside the 7 rows"),
        (replaced(f"{AUX}/row", [0, 1, 2, 3, 4, 5, -1]), "outside the 7 rows"),
        (replaced(f"{AUX}/row", [0, 1]), "7 rows of data, 2 row indices"),
        (replaced(f"{AUX}/data", np.zeros((7, 6), np.float32)), "holds float32, not uint16"),
        (replaced(f"{AUX}/data", np.zeros(7, np.uint16)), "1 axes, not 2"),
        (replaced(f"{AUX}/data", h5py.Empty("<u2")), "/data"),
        (attribute("dtype", "float4", AUX), "'float4'"),
        (attribute("dtype", 3, AUX), "dtype ''"),
        (attribute("site", "\x1b[31m", AUX), "site is not known"),
        (attribute("chunks", 0, AUX), "it has 0 chunks"),
        (claiming((2**40, 2**20)), "claims"),
        (claiming((7, 6)), "claims 84 bytes and holds 0"),
        (claiming((2**50,), f"{ROWS}/token"), "claims"),
        (elsewhere, "in another file"),
        (virtual, "in another file"),
        (linked("provenance", h5py.ExternalLink("other.h5", "/provenance")), "link that leads elsewhere"),
        (linked("requests", h5py.SoftLink("/ranks")), "link that leads elsewhere"),
        (linked("ranks/0", h5py.ExternalLink("/etc/passwd", "/")), "link that leads elsewhere"),
        (linked(AUX, h5py.SoftLink("/ranks/0/tensors/layer")), "link that leads elsewhere"),
        (linked(f"{AUX}/data", h5py.ExternalLink("other.h5", "/data")), "link that leads elsewhere"),
        (looped, "nested without end"),
        (widely_looped, "nested without end"),
        (lambda file: file.create_group("ranks/zero"), "a member is not a number"),
        (lambda file: file.create_group("ranks/0/tensors/\x1b[2J"), "cannot be printed"),
        (lambda file: file["ranks/0/tensors"].create_dataset("x", data=1), "it is not a group"),
    ],
)
def test_a_file_that_contradicts_the_format(trace_path: Path, change: Change, said: str) -> None:
    with h5py.File(trace_path, "r+", libver=("v110", "v110")) as file:
        change(file)
    assert said in str(the_error(trace_path))


@pytest.mark.parametrize("name", ["depths", "depth", "chunks"])
def test_an_attribute_of_another_kind_counts_as_absent(trace_path: Path, name: str) -> None:
    with h5py.File(trace_path, "r+", libver=("v110", "v110")) as file:
        file[AUX].attrs[name] = "three"
    with Trace.open(trace_path) as trace:
        assert getattr(trace.ranks[0].tensors["aux"], name) is None


def test_text_of_variable_length_is_refused_unread(trace_path: Path) -> None:
    """HDF5 keeps it in a heap without a checksum, and can search a damaged one for ever."""
    with h5py.File(trace_path, "r+", libver=("v110", "v110")) as file:
        del file["gaps"]
        file.create_dataset("gaps", data="[]", dtype=h5py.string_dtype())
    assert "not text of fixed length" in the_error(trace_path).what


def test_a_trace_has_no_heap_without_a_checksum(trace_path: Path) -> None:
    assert b"GCOL" not in trace_path.read_bytes()


def test_a_newer_schema_says_what_to_install(trace_path: Path) -> None:
    with h5py.File(trace_path, "r+") as file:
        file.attrs["schema_version"] = 7
    assert "newer hsprobe" in the_error(trace_path).fix


def test_a_flipped_byte_in_data_names_tensor_and_file(trace_path: Path) -> None:
    content = bytearray(trace_path.read_bytes())
    row = np.arange(4, 8, dtype=np.float32).tobytes()
    content[content.index(row) + 2] ^= 0x10
    trace_path.write_bytes(content)
    with Trace.open(trace_path) as trace:
        with pytest.raises(HsprobeError, match="checksum does not match") as caught:
            trace.ranks[0].tensors["layer/002"].read()
        assert "tensor layer/002" in str(caught.value)
        assert str(trace_path) in str(caught.value)
        assert trace.ranks[0].tensors["aux"].read().shape == (7, 6)


@many
@given(data=st.data())
def test_any_truncation_is_recognised(trace_path: Path, data: st.DataObject) -> None:
    whole = trace_path.read_bytes()
    cut = trace_path.with_name("cut.h5")
    cut.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    the_error(cut)


@many
@given(data=st.data())
def test_damage_anywhere_reads_or_is_named(trace_path: Path, data: st.DataObject) -> None:
    content = bytearray(trace_path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(content) - 1))
        patch = data.draw(st.binary(min_size=1, max_size=16))
        content[start : start + len(patch)] = patch
    hurt = trace_path.with_name("hurt.h5")
    hurt.write_bytes(content)
    with suppress(HsprobeError):
        read_everything(hurt)
