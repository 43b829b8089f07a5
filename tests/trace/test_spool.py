"""A spool gives back exactly what was flushed, whatever happened to its writer."""

import json
import os
import resource
import signal
import stat
import struct
import subprocess
import sys
import threading
import zlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hsprobe.errors import HsprobeError
from hsprobe.trace.spool import Record, SpoolReader, SpoolWriter, read_spool, wait_until_closed

records = st.lists(
    st.tuples(
        st.text(max_size=8),
        st.dictionaries(st.text(max_size=5), st.integers() | st.none() | st.text(max_size=5), max_size=3),
        st.lists(st.binary(max_size=400), max_size=3),
    ),
    max_size=6,
)
fresh_each_time = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def frame(content: object, payload: bytes = b"") -> bytes:
    """A frame made by hand from the description of the format."""
    text = content if isinstance(content, bytes) else json.dumps(content, separators=(",", ":")).encode()
    lengths = struct.pack("<IQ", len(text), len(payload))
    return b"HSPF" + lengths + struct.pack("<I", zlib.crc32(lengths + text + payload)) + text + payload


def contents(found: list[Record]) -> list[tuple[str, dict[str, object], bytes]]:
    return [(record.kind, record.header, record.payload) for record in found]


@fresh_each_time
@given(records)
def test_what_is_appended_is_read_back(
    tmp_path: Path, written: list[tuple[str, dict[str, object], list[bytes]]]
) -> None:
    path = tmp_path / "a.spool"
    path.unlink(missing_ok=True)
    with SpoolWriter(path) as spool:
        for kind, header, pieces in written:
            spool.append(kind, header, pieces)
    reader = SpoolReader(path)
    assert contents(list(reader)) == [(kind, header, b"".join(pieces)) for kind, header, pieces in written]
    assert not reader.torn
    assert reader.end == path.stat().st_size


def test_a_frame_is_laid_out_as_documented(tmp_path: Path) -> None:
    path = tmp_path / "a.spool"
    with SpoolWriter(path) as spool:
        spool.append("pass", {"n": 1}, memoryview(b"\x01\x02"))
    assert path.read_bytes() == frame(["pass", {"n": 1}], b"\x01\x02")


def test_reading_resumes_at_the_end_of_a_record(tmp_path: Path) -> None:
    path = tmp_path / "a.spool"
    with SpoolWriter(path) as spool:
        spool.append("one", {}, b"x" * 100)
        spool.append("two", {})
    first, second = read_spool(path)
    assert [record.kind for record in read_spool(path, first.end)] == ["two"]
    assert list(read_spool(path, second.end)) == []


def test_a_growing_spool_is_read_as_far_as_it_is_flushed(tmp_path: Path) -> None:
    path = tmp_path / "a.spool"
    with SpoolWriter(path) as spool:
        spool.append("one", {})
        spool.flush()
        reader = SpoolReader(path)
        assert [record.kind for record in reader] == ["one"]
        spool.append("two", {}, b"y" * 1_000_000)
        spool.flush()
        assert [record.kind for record in reader] == ["two"]
        assert not reader.torn


def test_large_and_small_records_keep_their_order(tmp_path: Path) -> None:
    path = tmp_path / "a.spool"
    sizes = [0, 10, 300_000, 5, 262_144, 262_100, 1, 2_000_000]
    with SpoolWriter(path) as spool:
        for n, size in enumerate(sizes):
            spool.append("r", {"n": n}, [bytes([n]) * (size // 2), bytes([n]) * (size - size // 2)])
    assert [(r.header["n"], r.payload) for r in read_spool(path)] == [
        (n, bytes([n]) * size) for n, size in enumerate(sizes)
    ]


def test_a_spool_cut_at_any_byte_gives_the_records_before_the_cut(tmp_path: Path) -> None:
    path = tmp_path / "a.spool"
    with SpoolWriter(path) as spool:
        for n in range(4):
            spool.append("r", {"n": n}, b"z" * 40)
    whole, ends = path.read_bytes(), [record.end for record in read_spool(path)]
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        reader = SpoolReader(path)
        assert len(list(reader)) == sum(end <= length for end in ends)
        assert reader.torn == (length not in {0, *ends})


def test_a_changed_byte_anywhere_ends_the_reading_before_its_record(tmp_path: Path) -> None:
    path = tmp_path / "a.spool"
    with SpoolWriter(path) as spool:
        for n in range(3):
            spool.append("r", {"n": n}, b"z" * 20)
    whole, ends = path.read_bytes(), [record.end for record in read_spool(path)]
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x40]) + whole[place + 1 :])
        if place < 4:
            with pytest.raises(HsprobeError, match="not a spool"):
                list(read_spool(path))
            continue
        reader = SpoolReader(path)
        assert len(list(reader)) == sum(end <= place for end in ends)
        assert reader.torn


@pytest.mark.parametrize(
    "hostile",
    [
        b"HSPF" + struct.pack("<IQI", 2, 2**63, 0) + b"[]",
        b"HSPF" + struct.pack("<IQI", 2**32 - 1, 0, 0),
        frame(["kind"]),
        frame(["kind", [1]]),
        frame({"kind": 1}),
        frame([1, {}]),
        frame(b"[" * 100_000),
        frame(b"\xff{]"),
        frame(b""),
    ],
)
def test_a_frame_that_lies_about_itself_is_treated_as_torn(tmp_path: Path, hostile: bytes) -> None:
    path = tmp_path / "a.spool"
    path.write_bytes(frame(["good", {}]) + hostile)
    reader = SpoolReader(path)
    assert [record.kind for record in reader] == ["good"]
    assert reader.torn


@pytest.mark.parametrize("content", [b"hello", b"\x89HDF\r\n\x1a\n", b"HSPX" + bytes(40), b"\0"])
def test_a_file_that_is_no_spool_is_refused_by_reader_and_writer(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.spool"
    path.write_bytes(content)
    with pytest.raises(HsprobeError, match="not a spool"):
        list(read_spool(path))
    with pytest.raises(HsprobeError, match="not a spool"):
        SpoolWriter(path)
    assert path.read_bytes() == content


def test_a_missing_spool_is_one_clear_sentence(tmp_path: Path) -> None:
    with pytest.raises(HsprobeError, match="cannot be opened: No such file"):
        list(read_spool(tmp_path / "none.spool"))


def test_a_spool_is_private_and_never_written_through_a_link(tmp_path: Path) -> None:
    path, link = tmp_path / "a.spool", tmp_path / "link.spool"
    SpoolWriter(path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    link.symlink_to(path)
    with pytest.raises(OSError, match="symbolic links"):
        SpoolWriter(link)


def test_a_spool_has_one_writer_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "a.spool"
    with SpoolWriter(path), pytest.raises(HsprobeError, match="another process"):
        SpoolWriter(path)
    SpoolWriter(path).close()


def test_a_writer_cuts_off_the_torn_record_of_a_crash_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "a.spool"
    path.write_bytes(frame(["one", {}]) + frame(["two", {}], b"abc")[:-1])
    with SpoolWriter(path) as spool:
        spool.append("three", {})
    reader = SpoolReader(path)
    assert [record.kind for record in reader] == ["one", "three"]
    assert not reader.torn


def test_a_closed_writer_refuses_records(tmp_path: Path) -> None:
    spool = SpoolWriter(tmp_path / "a.spool")
    spool.close()
    spool.close()
    with pytest.raises(ValueError, match="closed"):
        spool.append("r", {})
    with pytest.raises(ValueError, match="closed"):
        spool.flush()


def test_threads_may_share_a_writer(tmp_path: Path) -> None:
    path = tmp_path / "a.spool"

    def work(who: int) -> None:
        for n in range(200):
            spool.append("r", {"who": who, "n": n}, bytes([who]) * (2000 * (n % 3)))

    with SpoolWriter(path) as spool:
        threads = [threading.Thread(target=work, args=(who,)) for who in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = list(read_spool(path))
    for who in range(4):
        assert [r.header["n"] for r in found if r.header["who"] == who] == list(range(200))
    assert all(set(record.payload) <= {record.header["who"]} for record in found)


def test_a_full_disk_raises_and_leaves_a_sound_spool(tmp_path: Path) -> None:
    path = tmp_path / "a.spool"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with SpoolWriter(path) as spool:
        spool.append("one", {})
        spool.flush()
        resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, limits[1]))
        try:
            with pytest.raises(OSError, match="too large"):
                spool.append("two", {}, b"x" * 500_000)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, before)
        spool.append("three", {})
    reader = SpoolReader(path)
    assert [record.kind for record in reader] == ["one", "three"]
    assert not reader.torn


def test_a_killed_writer_loses_nothing_that_it_flushed(tmp_path: Path) -> None:
    path = tmp_path / "a.spool"
    program = """
import sys
from hsprobe.trace.spool import SpoolWriter
spool = SpoolWriter(sys.argv[1])
for n in range(10**9):
    spool.append("r", {"n": n}, bytes([n % 251]) * (n * 7919 % 600_000))
    spool.flush()
    print(n, flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(100)]
        os.kill(process.pid, signal.SIGKILL)
        flushed = int((lines + process.stdout.readlines())[-1])
    found = list(read_spool(path))
    assert [record.header["n"] for record in found] == list(range(len(found)))
    assert len(found) >= flushed + 1
    assert all(r.payload == bytes([n % 251]) * (n * 7919 % 600_000) for n, r in enumerate(found))


@pytest.mark.parametrize("module", ["hsprobe.trace", "hsprobe.trace.spool", "hsprobe.trace.schema"])
def test_what_a_server_imports_is_standard_library_only(module: str) -> None:
    program = f"import sys, {module}; print({{'numpy', 'h5py', 'torch', 'ml_dtypes'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_end_of_a_spools_writing_can_be_waited_for(tmp_path):
    path = tmp_path / "a.spool"
    assert wait_until_closed(path, 0)
    writer = SpoolWriter(path)
    assert not wait_until_closed(path, 0.05)
    threading.Timer(0.2, writer.close).start()
    assert wait_until_closed(path, 10)
