"""Whatever is opened as a dump: samples, or one clear `HsprobeError`; nothing is run, and nothing grows
without end.
"""

import gzip
import io
import os
import pickle
import struct
import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hsprobe.cli import main
from hsprobe.diagnose import diff
from hsprobe.errors import HsprobeError
from hsprobe.fixtures.dumps import baldeagle, eagle, plain, specforge
from hsprobe.fixtures.dumps.states import Request
from hsprobe.formats.containers import packed as packed_streams
from hsprobe.formats.dump import Options
from hsprobe.formats.registry import formats, open_dump
from hsprobe.formats.source import Source
from tests.formats.conftest import TRAINED

many = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    deadline=None,
    max_examples=60,
)

Write = Callable[[Path, Sequence[Request], Sequence[int]], None]
WRITERS: dict[str, tuple[Write, Options]] = {
    "specforge": (specforge.write, Options()),
    "specforge packed": (partial(specforge.write, compress=True), Options()),
    "specforge-server": (specforge.write_server, Options()),
    "eagle": (eagle.write, Options()),
    "baldeagle": (baldeagle.write, Options()),
    "plain": (plain.write, Options()),
    "plain npz": (plain.write_npz, Options()),
    "hdf5": (lambda folder, r, d: plain.write_hdf5(folder / "x.h5", r, d), Options(maps=plain.GROUPS)),
    "hdf5 flat": (
        lambda folder, r, d: plain.write_hdf5(folder / "x.h5", r, d, flat=True),
        Options(maps=plain.FLAT),
    ),
}
each_format = pytest.mark.parametrize("name", WRITERS)


def read_everything(path: Path, options: Options | None = None) -> int:
    """How many samples there are; each is read whole or skipped."""
    dump = open_dump(path, options)
    count = 0
    for sample in dump.samples():
        try:
            for rows in sample.rows:
                assert rows.read().shape == (rows.count, rows.width)
        except HsprobeError as error:
            dump.skip(sample.name, error)
        count += 1
    for _, why in dump.skipped:
        assert why.endswith(".")
        assert "\n" not in why
    return count


def sound_or_error(path: Path, options: Options | None = None) -> None:
    try:
        read_everything(path, options)
    except HsprobeError as error:
        for sentence in (error.what, error.fix):
            assert sentence.endswith(".")
            assert "\n" not in sentence


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and "vocab" not in path.name)


@each_format
@many
@given(data=st.data())
def test_flipped_and_missing_bytes(
    name: str, requests: list[Request], tmp_path: Path, data: st.DataObject
) -> None:
    write, options = WRITERS[name]
    folder = tmp_path / name
    if not folder.exists():
        write(folder, requests, TRAINED)
    path = files_of(folder)[0]
    sound = path.read_bytes()
    broken = bytearray(sound)
    # Structure lies at the beginning and the end; the middle is numbers.
    place = st.one_of(
        st.integers(0, min(len(sound), 4096) - 1), st.integers(max(0, len(sound) - 2048), len(sound) - 1)
    )
    for at, value in data.draw(st.lists(st.tuples(place, st.integers(0, 255)), min_size=1, max_size=8)):
        broken[at] = value
    cut = data.draw(st.one_of(st.none(), st.integers(0, len(sound))))
    try:
        path.write_bytes(broken if cut is None else broken[:cut])
        sound_or_error(folder, options)
    finally:
        path.write_bytes(sound)


@many
@given(content=st.binary(max_size=300), magic=st.sampled_from(
    [b"", b"PK\x03\x04", b"\x1f\x8b\x08\x00", b"\x93NUMPY\x01\x00", b"\x80\x02", b"\x10\0\0\0\0\0\0\0{",
     b"\x89HDF\r\n\x1a\n"]
), suffix=st.sampled_from([".ckpt", ".pt", ".npz", ".safetensors", ".h5", ".json", ".jsonl"]))  # fmt: skip
def test_any_bytes(content: bytes, magic: bytes, suffix: str, tmp_path: Path) -> None:
    (tmp_path / f"x{suffix}").write_bytes(magic + content)
    sound_or_error(tmp_path)
    sound_or_error(tmp_path, Options(maps={"input_ids": "ids", "aux": "aux"}))
    for key in formats():
        sound_or_error(tmp_path, Options(format=key))


@many
@given(content=st.binary(max_size=400))
def test_any_pickle_inside_a_torch_file(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", b"\x80\x02" + content)
        file.writestr("archive/data/0", b"\0" * 64)
    sound_or_error(tmp_path)


def torch_file(path: Path, data_pkl: bytes, storage: bytes = b"\0" * 64) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", data_pkl)
        file.writestr("archive/data/0", storage)


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("pwned",)


def test_no_code_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served: Path) -> None:
    monkeypatch.chdir(tmp_path)
    dump = tmp_path / "dump"
    dump.mkdir()
    ids = torch.arange(5)
    torch.save({"input_ids": ids, "hidden_state": Evil(), "x": Evil()}, dump / "data_0.ckpt")
    torch_file(dump / "data_1.ckpt", pickle.dumps(Evil(), 2))
    torch_file(dump / "data_2.ckpt", b"cos\nsystem\n(S'mkdir pwned'\ntR.")
    np.savez(dump / "a.npz", input_ids=np.array([Evil()], dtype=object), allow_pickle=True)
    for key in formats():
        sound_or_error(dump, Options(format=key))
    assert main(["diff", "dump", str(served)]) == 2
    assert not (tmp_path / "pwned").exists()


def test_a_gzip_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_streams, "_FREE", 1 << 20)
    with gzip.open(tmp_path / "data_0.ckpt.gz", "wb") as file:
        file.write(b"PK\x03\x04")
        for _ in range(16):
            file.write(b"\0" * (1 << 20))
    assert (tmp_path / "data_0.ckpt.gz").stat().st_size < 1 << 16
    with pytest.raises(HsprobeError, match="unpacks to more than"):
        Source(tmp_path).load("data_0.ckpt.gz")


def test_a_zip_bomb(tmp_path: Path) -> None:
    zeros = np.zeros(8 << 20, np.uint8)
    np.savez_compressed(tmp_path / "a.npz", input_ids=np.arange(4), aux=zeros.view(np.float32).reshape(4, -1))
    raw = bytearray((tmp_path / "a.npz").read_bytes())
    # The directory claims four gigabytes where there are eight megabytes.
    at = raw.rfind(b"aux.npy") - 46
    assert raw[at : at + 4] == b"PK\x01\x02"
    struct.pack_into("<I", raw, at + 24, 0xFFFFFFF0)
    (tmp_path / "a.npz").write_bytes(raw)
    sound_or_error(tmp_path)
    with zipfile.ZipFile(tmp_path / "x.ckpt", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", pickle.dumps({"a": "b" * 2_000_000}, 2))
    with pytest.raises(HsprobeError, match="compressed, which torch never does"):
        Source(tmp_path).load("x.ckpt")


@pytest.mark.parametrize(
    "shape",
    [(1 << 40, 1 << 20), (-1, 4), (1 << 62,), (3, "a"), (1,) * 100, (0, 0), (2, 2, 2, 2)],
    ids=str,
)
def test_absurd_shapes(shape: tuple[Any, ...], tmp_path: Path) -> None:
    header = {"input_ids": _entry("I64", [4], 0, 32), "aux": _entry("F32", list(shape), 32, 96)}
    text = str(header).replace("'", '"').encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 96)
    sound_or_error(tmp_path)
    storage = (("storage", "", "0", "cpu", 16), 0, shape, (1,) * len(shape), False, None)
    torch_file(tmp_path / "x.ckpt", _tensor_pickle(storage))
    sound_or_error(tmp_path, Options(format="eagle"))


def _entry(dtype: str, shape: list[Any], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def _tensor_pickle(arguments: tuple[Any, ...]) -> bytes:
    """{"hidden_state": torch._utils._rebuild_tensor_v2(*arguments)} with a storage by persistent id."""

    class Storage:
        pass

    class Pickler(pickle.Pickler):
        def persistent_id(self, found: Any) -> Any:
            return ("storage", torch.FloatStorage, "0", "cpu", 16) if isinstance(found, Storage) else None

    class Tensor:
        def __reduce__(self) -> Any:
            return torch._utils._rebuild_tensor_v2, (Storage(), *arguments[1:])

    out = io.BytesIO()
    Pickler(out, 2).dump({"hidden_state": Tensor()})
    return out.getvalue()


def test_nests_without_end(tmp_path: Path) -> None:
    deep = b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."
    torch_file(tmp_path / "x.ckpt", deep)
    sound_or_error(tmp_path)
    # A tuple of the same tuple twice, many times over, as a key: hashing it would take for ever.
    bomb = b"\x80\x02}K\x01" + b"2\x86" * 200 + b"K\x01s."
    torch_file(tmp_path / "x.ckpt", bomb)
    sound_or_error(tmp_path)
    (tmp_path / "x.ckpt").unlink()
    (tmp_path / "x.jsonl").write_bytes(b"[" * 1_000_000)
    sound_or_error(tmp_path)


def test_links_and_pipes(requests: list[Request], tmp_path: Path) -> None:
    specforge.write(tmp_path / "elsewhere", requests, TRAINED)
    specforge.write(tmp_path / "dump", requests, TRAINED)
    group = tmp_path / "dump" / "rows_0-2000"
    (group / "data_2.ckpt").symlink_to(tmp_path / "elsewhere" / "rows_0-2000" / "data_0.ckpt")
    (group / "data_3.ckpt").symlink_to(group / "data_0.ckpt")
    (tmp_path / "dump" / "rows_2000-4000").symlink_to(tmp_path / "elsewhere" / "rows_0-2000")
    (tmp_path / "dump" / "loop").symlink_to(tmp_path / "dump")
    os.mkfifo(group / "data_4.ckpt")
    dump = open_dump(tmp_path / "dump")
    assert [s.name for s in dump.samples()] == [f"rows_0-2000/data_{i}.ckpt" for i in (0, 1, 3)]
    assert ("rows_0-2000/data_2.ckpt", "it is a link that leads out of the folder") in dump.source.unread
    with pytest.raises(HsprobeError, match="leads out of the folder"):
        dump.source.load("rows_0-2000/data_2.ckpt")
    with pytest.raises(HsprobeError, match="leads out of the folder"):
        dump.source.load("../elsewhere/rows_0-2000/data_0.ckpt")


def test_hdf5_that_leads_elsewhere(requests: list[Request], tmp_path: Path) -> None:
    plain.write_hdf5(tmp_path / "secret.h5", requests, TRAINED, flat=True)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["ids"] = h5py.ExternalLink("secret.h5", "/ids")
        file["mid"] = h5py.SoftLink("/elsewhere")
        (tmp_path / "raw").write_bytes(b"\0" * 4096)
        file.create_dataset("outside", (4, 8), "f4", external=[("raw", 0, 128)])
        file.create_dataset("vast", (1 << 30, 1 << 10), "f4", chunks=(1, 1 << 10), compression="gzip")
        file["text"] = ["a", "b"]
    for place in ("mid", "outside", "vast", "text", "ids"):
        with pytest.raises(HsprobeError):
            open_dump(tmp_path / "x.h5", Options(maps={"input_ids": "ids", "aux": place}))


def test_a_corrupt_sample_is_named_and_the_rest_is_used(
    requests: list[Request], served: Path, tmp_path: Path
) -> None:
    specforge.write(tmp_path / "dump", [*requests, *requests], TRAINED)
    bad = tmp_path / "dump" / "rows_0-2000" / "data_0.ckpt"
    bad.write_bytes(bad.read_bytes()[:300])
    report = diff(tmp_path / "dump", served)
    assert report.same
    assert report.coverage.matched == 42
    assert any("1 sample could not be read. rows_0-2000/data_0.ckpt" in note for note in report.notes)


def test_nothing_left_is_trouble(
    requests: list[Request], served: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    specforge.write(tmp_path / "dump", requests, TRAINED)
    for path in files_of(tmp_path / "dump"):
        path.write_bytes(path.read_bytes()[:300])
    assert main(["diff", str(tmp_path / "dump"), str(served), "--train-format", "specforge"]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("hsprobe: ")
    assert "holds no sample of SpecForge offline that can be read" in said
