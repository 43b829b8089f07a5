"""Files on web servers: ranges of them, and what a web server cannot do, in one sentence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hsprobe.cli import main
from hsprobe.diagnose import diff
from hsprobe.fixtures.dumps import plain
from hsprobe.fixtures.dumps.states import Request
from hsprobe.formats.dump import Options
from hsprobe.formats.registry import open_dump
from hsprobe.remote.location import locate
from tests.remote.conftest import TRAINED, Web


def test_a_trace_is_compared_over_the_web(served: Path, web: Web) -> None:
    web.files["/infer%20file.h5"] = served.read_bytes()
    report = diff(served, f"{web.url}/infer%20file.h5")
    assert report.same
    assert report.infer.path == f"{web.url}/infer%20file.h5"


def test_a_file_of_a_dump_is_read_over_the_web(
    requests: list[Request], served: Path, web: Web, tmp_path: Path
) -> None:
    plain.write_hdf5(tmp_path / "dump.h5", requests, TRAINED, flat=True)
    web.files["/dump.h5"] = (tmp_path / "dump.h5").read_bytes()
    assert diff(f"{web.url}/dump.h5", served, dump=Options(maps=plain.FLAT)).same


def test_only_the_ranges_needed_are_asked_for(web: Web, tmp_path: Path) -> None:
    states = np.random.default_rng(0).standard_normal((4096, 2048)).astype(np.float32)
    np.savez(tmp_path / "data.npz", input_ids=np.arange(4096), aux=states)
    web.files["/data.npz"] = (tmp_path / "data.npz").read_bytes()
    dump = open_dump(locate(f"{web.url}/data.npz"))
    [name] = dump.reader.names()
    ids = dump.tokens(name)
    assert ids is not None
    assert ids.tolist() == list(range(4096))
    assert 0 < web.sent < len(web.files["/data.npz"]) / 20


def test_a_server_without_ranges_is_named_before_it_sends_everything(
    served: Path, web: Web, capsys: pytest.CaptureFixture[str]
) -> None:
    web.files["/infer.h5"] = served.read_bytes() + bytes(64 << 20)
    web.ranges = False
    assert main(["inspect", f"{web.url}/infer.h5"]) == 2
    assert "sends whole files only" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "words"),
    [("/nothing.h5", "There is no file"), ("/folder/", "cannot be listed"), ("", "There is no file")],
)
def test_what_the_web_does_not_have(
    path: str, words: str, web: Web, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", f"{web.url}{path}"]) == 2
    assert words in capsys.readouterr().err


def test_a_lost_connection_is_no_damaged_sample(
    served: Path, web: Web, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    np.savez(
        tmp_path / "data.npz",
        input_ids=np.arange(2000),
        aux=np.random.default_rng(0).standard_normal((2000, 6000)).astype(np.float32),
    )
    web.files["/data.npz"] = (tmp_path / "data.npz").read_bytes()
    assert main(["convert", f"{web.url}/data.npz", str(tmp_path / "out.h5")]) == 0
    whole = web.requests
    capsys.readouterr()
    for after in sorted({2, whole // 2, whole - 1}):
        from hsprobe.remote import stream

        stream._blocks = stream._Blocks()
        web.requests, web.fails_after = 0, after
        assert main(["convert", f"{web.url}/data.npz", str(tmp_path / "again.h5")]) == 2
        said = capsys.readouterr().err
        assert "the connection failed" in said or "could not be" in said
        assert "Traceback" not in said
        assert not (tmp_path / "again.h5").exists()


def test_the_secret_of_a_signed_link_is_not_shown(
    served: Path, web: Web, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    web.files["/infer.h5?signature=SECRET"] = served.read_bytes()
    url = f"{web.url}/infer.h5?signature=SECRET"
    report = tmp_path / "report.html"
    assert main(["diff", str(served), url, "--format", "html", "-o", str(report)]) == 0
    assert "SECRET" not in report.read_text()
    web.files.clear()
    assert main(["diff", str(served), url]) == 2
    said = capsys.readouterr()
    assert "SECRET" not in said.out + said.err
