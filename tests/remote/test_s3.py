"""Dumps and traces in a bucket: what a local path gives, for a small part of the bytes."""

from __future__ import annotations

import gc
import json
import threading
from pathlib import Path

import numpy as np
import pytest

from hsprobe.cli import main
from hsprobe.diagnose import diff
from hsprobe.fixtures.dumps import baldeagle, plain, specforge
from hsprobe.fixtures.dumps.states import Request
from hsprobe.remote import stream
from hsprobe.remote.location import locate
from hsprobe.trace.reader import Trace
from hsprobe.trace.writer import TraceWriter
from tests.remote.conftest import BUCKET, S3, TRAINED

DATA = Path(__file__).parents[1] / "formats/data"
MiB = 1 << 20


@pytest.mark.parametrize("writer", [specforge, baldeagle, plain])
def test_a_dump_in_a_bucket_gives_the_report_of_a_local_one(
    writer: object, requests: list[Request], served: Path, tmp_path: Path, s3: S3
) -> None:
    writer.write(tmp_path / "dump", requests, [depth - 1 for depth in TRAINED])  # type: ignore[attr-defined]
    url = s3.put(tmp_path / "dump", f"{writer.__name__}/dump")  # type: ignore[attr-defined]
    here, there = diff(tmp_path / "dump", served), diff(url, served)
    assert [found.code for found in here.findings] == [found.code for found in there.findings] != []
    assert here.chunks == there.chunks
    assert there.train.path == url


@pytest.mark.parametrize(
    "dump",
    ["specforge/packed", "speculators/current", "automodel", "modelopt/hf", "sglang/dumper", "torchspec"],
)
def test_real_dumps_convert_to_the_same_trace(dump: str, tmp_path: Path, s3: S3) -> None:
    url = s3.put(DATA / dump, f"real/{dump}")
    for source, target in ((str(DATA / dump), "here.h5"), (url, "there.h5")):
        assert main(["convert", source, str(tmp_path / target), "--num-layers", "12"]) == 0
    with Trace.open(tmp_path / "here.h5") as here, Trace.open(tmp_path / "there.h5") as there:
        assert here.requests.ids == there.requests.ids
        assert here.ranks[0].tensors.keys() == there.ranks[0].tensors.keys() != set()
        for name, tensor in here.ranks[0].tensors.items():
            np.testing.assert_array_equal(tensor.read_raw(), there.ranks[0].tensors[name].read_raw())


@pytest.fixture
def large_trace(tmp_path: Path) -> Path:
    """48 MiB of states, in one tensor."""
    path = tmp_path / "large.h5"
    rows, width = 12 * 1024, 1024
    with TraceWriter(path, {"producer": "test"}) as writer:
        writer.add_rank(0, {})
        writer.add_passes(
            0, {"id": [0], "model": [0], "phase": [1], "mode": [2], "n_rows": [rows], "time": [0.0]}
        )
        labels = np.arange(rows)
        writer.append_rows(
            0,
            {
                "pass": labels * 0,
                "request": labels * 0,
                "position": labels,
                "token": labels,
                "context": labels + 1,
                "status": labels * 0,
            },
        )
        values = np.random.default_rng(0).standard_normal((rows, width)).astype(np.float32)
        writer.append(0, "layer/002", values, labels, site="layer", dtype="float32", depth=2)
        writer.set_requests(["a"], [labels.tolist()], [rows])
    return path


def test_of_a_large_trace_only_what_is_needed_is_read(large_trace: Path, s3: S3, tmp_path: Path) -> None:
    url = s3.put(large_trace, "large")
    s3.sent = 0
    out = tmp_path / "facts.json"
    assert main(["inspect", url, "--format", "json", "-o", str(out)]) == 0
    assert json.loads(out.read_text())["path"] == url
    assert 0 < s3.sent < 4 * MiB < large_trace.stat().st_size / 8
    s3.sent = 0
    with Trace.open(url) as there, Trace.open(large_trace) as here:
        rows = slice(8000, 8100)
        tensors = [trace.ranks[0].tensors["layer/002"] for trace in (there, here)]
        np.testing.assert_array_equal(tensors[0].read_raw(rows), tensors[1].read_raw(rows))
    assert s3.sent < 6 * MiB


def test_a_whole_tensor_is_read_once(large_trace: Path, s3: S3) -> None:
    url = s3.put(large_trace, "whole")
    s3.sent = s3.requests = 0
    with Trace.open(url) as there, Trace.open(large_trace) as here:
        np.testing.assert_array_equal(
            there.ranks[0].tensors["layer/002"].read_raw(), here.ranks[0].tensors["layer/002"].read_raw()
        )
    size = large_trace.stat().st_size
    assert size <= s3.sent < 1.2 * size
    assert s3.requests < 60


def test_token_ids_of_many_files_are_read_without_their_states(
    requests: list[Request], tmp_path: Path, s3: S3
) -> None:
    rng = np.random.default_rng(0)
    for number in range(40):
        np.savez(
            tmp_path / f"data_{number}.npz",
            input_ids=np.arange(number, number + 300),
            aux=rng.standard_normal((300, 3 * 512)).astype(np.float32),
        )
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    url = s3.put(tmp_path, "many")
    s3.sent = s3.requests = 0
    from hsprobe.formats.registry import open_dump

    dump = open_dump(locate(url))
    ids = [dump.tokens(name) for name in dump.reader.names()]
    assert [int(one[0]) for one in ids if one is not None] == list(range(40))
    assert s3.sent < size / 4


def test_the_blocks_kept_are_bounded(large_trace: Path, s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "CACHE_BYTES", 4 * stream.BLOCK)
    blocks = stream._Blocks()
    monkeypatch.setattr(stream, "_blocks", blocks)
    url = s3.put(large_trace, "bounded")
    with Trace.open(url) as there:
        there.ranks[0].tensors["layer/002"].read_raw(slice(0, 4000))
    assert sum(map(len, blocks._kept.values())) <= 4 * stream.BLOCK


def test_collecting_garbage_of_hdf5_in_another_thread_stops_nothing(large_trace: Path, s3: S3) -> None:
    """HDF5's objects take its lock when they go; the thread that holds it waits for fsspec's thread."""
    url = s3.put(large_trace, "garbage")

    def read() -> None:
        with Trace.open(url) as there:
            tensor = there.ranks[0].tensors["layer/002"]
            for start in range(0, 8000, 500):
                knot: list[object] = [tensor._data[:1], tensor._data.id, tensor._data.parent]
                knot.append(knot)
                tensor.read_raw(slice(start, start + 500))

    before = gc.get_threshold()
    gc.set_threshold(5, 2, 2)
    try:
        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        thread.join(120)
        assert not thread.is_alive()
    finally:
        gc.set_threshold(*before)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (f"s3://{BUCKET}/nothing/here", "There is no file"),
        ("s3://no-such-bucket-at-all/dump", "There is no file"),
        (f"s3://{BUCKET}/nothing.h5", "There is no file"),
    ],
)
def test_what_is_not_there_is_said(
    url: str, words: str, s3: S3, served: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["inspect", url], ["diff", url, str(served)], ["diff", str(served), url]):
        assert main(command) == 2
        said = capsys.readouterr().err
        assert words in said
        assert url in said
        assert "Traceback" not in said
    assert not threading.current_thread().daemon


def test_without_credentials_it_says_so(
    s3: S3, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    try:
        assert main(["inspect", f"s3://{BUCKET}/large/large.h5"]) == 2
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
    assert "credentials" in capsys.readouterr().err
