"""What is written to a trace is read back: bits, labels, and only the rows and columns asked for."""

import os
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import h5py
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hsprobe.errors import HsprobeError
from hsprobe.trace import tensor as tensor_module
from hsprobe.trace.reader import Trace
from hsprobe.trace.schema import ITEM_SIZE, STORAGE, Launch
from hsprobe.trace.writer import TraceWriter

many = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)


def write_one(
    path: Path, data: np.ndarray, dtype: str, *, step: int = 10**9, chunks: int | None = None
) -> Path:
    """A trace of one tensor, appended `step` rows at a time."""
    n = len(data)
    with TraceWriter(path, {}) as writer:
        writer.add_rank(0, {})
        writer.add_passes(
            0, {"id": [0], "model": [0], "phase": [0], "mode": [0], "n_rows": [n], "time": [0.0]}
        )
        zeros = np.zeros(n, np.int64)
        rows = {"pass": zeros, "request": zeros - 1, "position": np.arange(n), "token": zeros}
        writer.append_rows(0, rows | {"context": np.arange(n), "status": zeros})
        for lo in range(0, n, step):
            block = data[lo : lo + step]
            index = np.arange(lo, lo + len(block))
            writer.append(0, "x", block, index, site="x", dtype=dtype, chunks=chunks)
    return path


@pytest.mark.parametrize("dtype", sorted(STORAGE))
def test_random_bits_of_every_type_come_back_as_they_were(tmp_path: Path, dtype: str) -> None:
    rng = np.random.default_rng(17)
    raw = rng.integers(0, 256, (257, 12 * ITEM_SIZE[dtype]), np.uint8).view(STORAGE[dtype])
    with Trace.open(write_one(tmp_path / "x.h5", raw, dtype, step=50)) as trace:
        back = trace.ranks[0].tensors["x"].read_raw()
        assert back.dtype == np.dtype(STORAGE[dtype])
        assert back.tobytes() == raw.tobytes()


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "bfloat16", "float16"])
def test_every_bit_pattern_comes_back_nan_payloads_included(tmp_path: Path, dtype: str) -> None:
    bits = 8 * ITEM_SIZE[dtype]
    raw = np.arange(2**bits).astype(f"<u{bits // 8}").view(STORAGE[dtype]).reshape(-1, 16)
    with Trace.open(write_one(tmp_path / "x.h5", raw, dtype)) as trace:
        tensor = trace.ranks[0].tensors["x"]
        assert tensor.read_raw().tobytes() == raw.tobytes()
        real = np.dtype(np.float16) if dtype == "float16" else np.dtype(getattr(ml_dtypes, dtype))
        values = tensor.read()
        assert values.dtype == np.float32
        np.testing.assert_array_equal(values, raw.view(real).astype(np.float32))
        finite = np.isfinite(values)
        assert (values[finite].astype(real).view(raw.dtype) == raw[finite]).all()


def test_bfloat16_is_the_upper_half_of_float32(tmp_path: Path) -> None:
    raw = np.arange(2**16).astype("<u2").reshape(-1, 64)
    with Trace.open(write_one(tmp_path / "x.h5", raw, "bfloat16")) as trace:
        assert ((trace.ranks[0].tensors["x"].read().view(np.uint32) >> 16) == raw).all()


def test_labels_requests_gaps_and_provenance_come_back(trace_path: Path) -> None:
    with Trace.open(trace_path) as trace:
        assert trace.state == "complete"
        assert trace.provenance == {"producer": "test"}
        assert trace.gaps[0]["reason"] == "disarmed"
        assert trace.requests.ids == ["a", "ü"]
        assert [trace.requests.tokens(r).tolist() for r in range(2)] == [[11, 12, 13, 14], [11, 12, 99]]
        assert trace.requests.prompt_len.tolist() == [3, 2]
        (rank,) = trace.ranks
        sizes = {"tp_size": 1, "pp_size": 1, "dp_size": 1, "attn_tp_size": 1}
        assert rank.coords == {"tp": 1, "pp": 0, "dp": 0, "attn_tp": 1, **sizes}
        assert rank.layers is None
        assert rank.passes["id"].tolist() == [4, 5]
        assert rank.rows["token"].tolist() == [11, 12, 13, 11, 12, 14, 99]
        assert rank.rows["context"].dtype == np.uint64
        assert sorted(rank.tensors) == ["aux", "layer/002"]
        aux, layer = rank.tensors["aux"], rank.tensors["layer/002"]
        assert (aux.site, aux.depth, aux.depths, aux.chunks, aux.chunk_width) == (
            "aux",
            None,
            [2, 4, 6],
            3,
            2,
        )
        assert (layer.site, layer.depth, layer.depths, layer.chunks) == ("layer", 2, None, None)
        assert aux.row_index.tolist() == list(range(7))
        assert aux.row_index is layer.row_index


def test_how_a_pass_was_launched_comes_back_and_older_files_lack_it(trace_path: Path) -> None:
    with Trace.open(trace_path) as trace:
        assert trace.ranks[0].passes["graph"].tolist() == [Launch.EAGER, Launch.EAGER]
    with h5py.File(trace_path, "r+") as file:
        file["ranks/0/passes/graph"][:] = [0, 1]
    with Trace.open(trace_path) as trace:
        assert trace.ranks[0].passes["graph"].tolist() == [Launch.EAGER, Launch.GRAPH]
    with h5py.File(trace_path, "r+") as file:
        del file["ranks/0/passes/graph"]
    with Trace.open(trace_path) as trace:
        assert trace.ranks[0].passes["graph"].tolist() == [0, 0]


def test_depth_final_has_its_own_name(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "x.h5", {}) as writer:
        writer.add_rank(0, {})
        block = np.zeros((0, 3), np.float32)
        writer.append(0, "final", block, [], site="layer", dtype="float32", depth="final")
    with Trace.open(tmp_path / "x.h5") as trace:
        assert trace.ranks[0].tensors["final"].depth == "final"
        assert trace.ranks[0].tensors["final"].read().shape == (0, 3)


@pytest.mark.parametrize("step", [1, 3, 64, 1000])
def test_how_rows_were_appended_leaves_no_mark(tmp_path: Path, step: int) -> None:
    raw = np.random.default_rng(step).random((1000, 700)).astype(np.float32)
    with Trace.open(write_one(tmp_path / "x.h5", raw, "float32", step=step)) as trace:
        assert (trace.ranks[0].tensors["x"].read() == raw).all()
        assert trace.ranks[0].tensors["x"].row_index.tolist() == list(range(1000))


N, K, H = 700, 3, 32
SELECTIONS = st.one_of(
    st.none(),
    st.slices(N),
    hnp.arrays(np.int64, st.integers(0, 60), elements=st.integers(0, N - 1)),
    hnp.arrays(np.bool_, N),
)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, np.ndarray]:
    raw = np.random.default_rng(3).integers(0, 2**16, (N, K * H), np.uint16)
    path = write_one(tmp_path_factory.mktemp("wide") / "x.h5", raw, "bfloat16", chunks=K)
    return Trace.open(path), raw


@many
@given(sel=SELECTIONS, chunk=st.none() | st.integers(0, K - 1), block=st.sampled_from([64, 4096, 8 << 20]))
def test_any_selection_reads_as_numpy_would(
    wide: tuple[Trace, np.ndarray], sel: slice | np.ndarray | None, chunk: int | None, block: int
) -> None:
    trace, raw = wide
    columns = slice(None) if chunk is None else slice(chunk * H, (chunk + 1) * H)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_module, "_BLOCK_BYTES", block)
        read = trace.ranks[0].tensors["x"].read_raw(sel, chunk)
    expected = raw[slice(None) if sel is None else sel][:, columns]
    assert read.shape == expected.shape
    assert (read == expected).all()


@pytest.mark.parametrize(
    ("sel", "chunk"),
    [(np.array([N]), None), (np.array([-1]), None), (np.zeros(3, bool), None), (None, K), (None, -1)],
)
def test_a_selection_out_of_range_is_an_index_error(
    wide: tuple[Trace, np.ndarray], sel: np.ndarray | None, chunk: int | None
) -> None:
    with pytest.raises(IndexError, match="x"):
        wide[0].ranks[0].tensors["x"].read(sel, chunk)


def test_chunks_that_do_not_divide_the_width_are_trouble_only_when_asked_for(tmp_path: Path) -> None:
    path = write_one(tmp_path / "x.h5", np.zeros((2, 7), np.float32), "float32", chunks=3)
    with Trace.open(path) as trace:
        assert trace.ranks[0].tensors["x"].read().shape == (2, 7)
        with pytest.raises(HsprobeError, match="7 wide, no multiple of 3 chunks"):
            trace.ranks[0].tensors["x"].read(chunk=0)


def test_a_chunk_is_stored_apart_from_its_neighbours(tmp_path: Path) -> None:
    """Reading chunk 1 survives damage to the bytes of chunk 0: they are not read."""
    raw = np.full((64, 2 * 512), 0x3C3C, np.uint16)
    raw[:, :512] = 0x4141
    path = write_one(tmp_path / "x.h5", raw, "bfloat16", chunks=2)
    content = bytearray(path.read_bytes())
    content[content.index(b"\x41\x41" * 512) + 100] ^= 1
    path.write_bytes(content)
    with Trace.open(path) as trace:
        assert (trace.ranks[0].tensors["x"].read_raw(chunk=1) == 0x3C3C).all()
        with pytest.raises(HsprobeError, match="checksum"):
            trace.ranks[0].tensors["x"].read_raw(chunk=0)


def test_reading_a_few_rows_takes_the_memory_of_a_few_rows(tmp_path: Path) -> None:
    raw = np.zeros((40_000, 512), np.uint16)
    with Trace.open(write_one(tmp_path / "x.h5", raw, "bfloat16", step=1000)) as trace:
        tensor = trace.ranks[0].tensors["x"]
        picked = np.arange(0, 40_000, 400)
        tensor.read(picked)
        tracemalloc.start()
        tensor.read(picked)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 12 << 20 < raw.nbytes


def test_writing_holds_back_little(tmp_path: Path) -> None:
    block = np.zeros((100, 1024), np.float32)
    with TraceWriter(tmp_path / "x.h5", {}) as writer:
        writer.add_rank(0, {})
        zeros = np.zeros(100, np.int64)
        names = ("pass", "request", "position", "token", "context", "status")
        writer.append_rows(0, dict.fromkeys(names, zeros))
        tracemalloc.start()
        for _ in range(200):
            writer.append(0, "x", block, zeros, site="x", dtype="float32")
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        writer.add_passes(
            0, {"id": [0], "model": [0], "phase": [0], "mode": [0], "n_rows": [100], "time": [0]}
        )
    assert peak < 8 << 20 < 200 * block.nbytes


def test_a_reader_takes_no_lock(trace_path: Path) -> None:
    program = "import sys, h5py; h5py.File(sys.argv[1], 'r+').attrs['note'] = 'written meanwhile'"
    with Trace.open(trace_path), Trace.open(trace_path):
        subprocess.run([sys.executable, "-c", program, str(trace_path)], check=True)
    with h5py.File(trace_path) as file:
        assert file.attrs["note"] == "written meanwhile"


def test_an_exception_leaves_neither_file_nor_partial_and_keeps_the_older_trace(trace_path: Path) -> None:
    before = trace_path.read_bytes()
    with pytest.raises(ValueError, match="exactly the columns"), TraceWriter(trace_path, {}) as writer:
        writer.add_passes(0, {})
    assert trace_path.read_bytes() == before
    assert list(trace_path.parent.iterdir()) == [trace_path]


def test_the_final_name_appears_only_when_all_is_written(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    with TraceWriter(path, {}) as writer:
        assert [file.name for file in tmp_path.iterdir()] == ["x.h5.partial"]
        writer.update_provenance({"late": 1})
        writer.close("recovered")
        assert [file.name for file in tmp_path.iterdir()] == ["x.h5"]
    with Trace.open(path) as trace:
        assert (trace.state, trace.provenance) == ("recovered", {"late": 1})


def test_a_writer_killed_mid_write_leaves_a_partial_that_explains_itself(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    program = """
import sys, numpy as np
from hsprobe.trace.writer import TraceWriter
writer = TraceWriter(sys.argv[1], {})
writer.add_rank(0, {})
for n in range(10**9):
    columns = ("pass", "request", "position", "token", "context", "status")
    first = writer.append_rows(0, {name: [0] for name in columns})
    writer.append(0, "x", np.zeros((1, 50_000), np.float32), [first], site="x", dtype="float32")
    print(n, flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for _ in range(100):
            process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
    partial = tmp_path / "x.h5.partial"
    assert list(tmp_path.iterdir()) == [partial]
    with pytest.raises(HsprobeError, match="half-written"):
        Trace.open(partial)
    # Renaming it does not make it whole.
    partial.rename(path)
    with pytest.raises(HsprobeError, match=r"half-written|damaged"):
        Trace.open(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"data": np.zeros((2, 4), np.float64)}, "float32 is stored as"),
        ({"data": np.zeros(2, np.float32)}, "do not fit"),
        ({"row_index": [0]}, "do not fit"),
        ({"row_index": [0, 2]}, "row index outside"),
        ({"row_index": [-1, 0]}, "row index outside"),
        ({"dtype": "float4"}, "unknown dtype"),
        ({"name": "a//b"}, "cannot be the name"),
        ({"name": "../b"}, "cannot be the name"),
        ({"name": "a\x1b[0m"}, "cannot be the name"),
        ({"depth": 4}, "changed"),
        ({"data": np.zeros((2, 5), np.float32)}, "changed"),
    ],
)
def test_a_writer_refuses_what_contradicts_itself(
    tmp_path: Path, change: dict[str, object], said: str
) -> None:
    with TraceWriter(tmp_path / "x.h5", {}) as writer:
        writer.add_rank(0, {})
        columns = ("pass", "request", "position", "token", "context", "status")
        writer.append_rows(0, {name: [0, 0] for name in columns})
        good = {
            "name": "x",
            "data": np.zeros((2, 4), np.float32),
            "row_index": [0, 1],
            "site": "x",
            "dtype": "float32",
        }
        writer.append(0, **good)
        with pytest.raises(ValueError, match=said):
            writer.append(0, **(good | change))
        writer.abort()
    assert list(tmp_path.iterdir()) == []


def test_tables_need_all_their_columns_at_one_length(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "x.h5", {}) as writer:
        writer.add_rank(0, {})
        with pytest.raises(ValueError, match="exactly the columns"):
            writer.append_rows(0, {"pass": [0]})
        columns = ("pass", "request", "position", "token", "context", "status")
        with pytest.raises(ValueError, match="differ in length"):
            writer.append_rows(0, {name: [0] for name in columns} | {"token": [1, 2]})
        with pytest.raises(ValueError, match="added before"):
            writer.add_rank(0, {})
        writer.finish_rank(0)
        with pytest.raises(ValueError, match="rank 0 is finished"):
            writer.append(0, "x", np.zeros((0, 1), np.float32), [], site="x", dtype="float32")
        with pytest.raises(ValueError, match="unknown state"):
            writer.close("finished")


def test_a_trace_that_cannot_be_written_is_one_clear_sentence(tmp_path: Path) -> None:
    with pytest.raises(HsprobeError, match=r"none/x.h5 cannot be written: .*No such file"):
        TraceWriter(tmp_path / "none" / "x.h5", {})


def test_two_writers_of_one_trace_are_kept_apart(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "x.h5", {}), pytest.raises(HsprobeError, match="cannot be written"):
        TraceWriter(tmp_path / "x.h5", {})
