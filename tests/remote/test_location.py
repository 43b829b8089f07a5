"""What is a URL, what it may reach, and what is said where a package for it is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest

from hsprobe.cli import main
from hsprobe.errors import HsprobeError
from hsprobe.formats.registry import open_dump
from hsprobe.formats.source import Source
from hsprobe.remote.location import Remote, locate

DATA = Path(__file__).parents[1] / "formats/data"


def _upload(folder: Path, to: str) -> str:
    files = fsspec.filesystem("memory")
    for path in folder.rglob("*"):
        if path.is_file():
            files.pipe_file(f"/{to}/{path.relative_to(folder)}", path.read_bytes())
    return f"memory://{to}"


@pytest.mark.parametrize("text", ["dump", "/a/b.h5", "C:/x", "a:b", "./s3:/x"])
def test_paths_stay_paths(text: str) -> None:
    assert locate(text) == Path(text)


def test_a_file_url_is_a_path() -> None:
    assert locate("file:///tmp/x.h5") == Path("/tmp/x.h5")


@pytest.mark.parametrize(
    ("url", "name", "suffix"),
    [
        ("s3://bucket/dumps/infer.h5", "infer.h5", ".h5"),
        ("https://h/a%20b.h5?x=1", "a b.h5", ".h5"),
        ("gs://bucket/dumps/", "dumps", ""),
    ],
)
def test_names_of_urls(url: str, name: str, suffix: str) -> None:
    found = locate(url)
    assert isinstance(found, Remote)
    assert (found.name, found.suffix) == (name, suffix)


def test_a_member_of_a_signed_link_keeps_its_query_out_of_the_path() -> None:
    assert (Remote("https://h/dir?sig=1") / "a#b?c.pt").url == "https://h/dir/a%23b%3Fc.pt?sig=1"


def test_no_chain_of_urls_is_followed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["inspect", "simplecache::s3://bucket/x"])
    assert end.value.code == 2
    assert "chain" in capsys.readouterr().err


def test_nothing_is_written_to_a_url(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["convert", "dump", "s3://bucket/x.h5"])
    assert end.value.code == 2
    assert "has to be a local path" in capsys.readouterr().err


def test_a_dump_in_memory_is_read_like_any_other() -> None:
    url = _upload(DATA / "specforge/plain", "plain")
    there, here = open_dump(locate(url)), open_dump(DATA / "specforge/plain")
    assert list(there.reader.names()) == list(here.reader.names()) != []


def test_files_come_in_natural_order_without_hidden_ones() -> None:
    files = fsspec.filesystem("memory")
    for name in ("data_10.pt", "data_2.pt", ".hidden.pt", "sub/data_1.pt", ".git/data_3.pt"):
        files.pipe_file(f"/ordered/{name}", b"x")
    found = list(Source(locate("memory://ordered")).files(".pt"))
    assert found == [
        "data_2.pt",
        "data_10.pt",
        "sub/data_1.pt",
    ]


def test_folders_are_followed_no_deeper_than_locally() -> None:
    files = fsspec.filesystem("memory")
    deep = "/".join(map(str, range(12)))
    files.pipe_file(f"/deep/{deep}/x.pt", b"x")
    files.pipe_file("/deep/0/1/x.pt", b"x")
    assert list(Source(locate("memory://deep")).files()) == ["0/1/x.pt"]


@pytest.mark.parametrize("name", ["../secret.pt", "/secret.pt", "a/../../secret.pt"])
def test_no_name_leads_out_of_the_folder(name: str) -> None:
    files = fsspec.filesystem("memory")
    files.pipe_file("/secret.pt", b"x")
    files.pipe_file("/out/a/x.pt", b"x")
    source = Source(locate("memory://out"))
    assert not source.has(name)
    with pytest.raises(HsprobeError, match="leads out of the folder"):
        source.bytes_of(name)


@pytest.mark.parametrize(
    "named", ["memory://elsewhere/data.arrow", "../elsewhere/data.arrow", "/elsewhere/data.arrow"]
)
def test_the_contents_of_a_dump_choose_no_url(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    files = fsspec.filesystem("memory")
    url = _upload(DATA / "speculators/current", "stated")
    arrow = "data-00000-of-00001.arrow"
    files.pipe_file("/elsewhere/data.arrow", files.cat_file(f"/stated/{arrow}"))
    text = files.cat_file("/stated/state.json").decode()
    assert arrow in text
    files.pipe_file("/stated/state.json", text.replace(arrow, named).encode())
    read: list[str] = []
    fetch = Remote.fetch

    def noted(where: Remote, start: int, stop: int) -> bytes:
        read.append(where.url)
        return fetch(where, start, stop)

    monkeypatch.setattr(Remote, "fetch", noted)
    dump = open_dump(locate(url))
    assert all(dump.sample(name) for name in dump.reader.names())
    assert any("its data set is left out" in note for note in dump.layout.notes)
    assert read
    assert all(one.startswith("memory://stated/") for one in read)


def test_a_missing_package_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "gs://bucket/infer.h5"]) == 2
    said = capsys.readouterr().err
    assert "gcsfs" in said
    assert "pip install 'hsprobe[remote]' gcsfs" in said


def test_an_unknown_protocol_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "nosuch://bucket/infer.h5"]) == 2
    assert "no protocol nosuch://" in capsys.readouterr().err


def test_without_fsspec_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    assert main(["inspect", "s3://bucket/infer.h5"]) == 2
    assert "pip install 'hsprobe[remote]'" in capsys.readouterr().err


def test_local_paths_never_load_fsspec() -> None:
    program = (
        "import sys; from hsprobe.cli import main; "
        f"assert main(['inspect', {str(DATA / 'specforge/plain')!r}]) == 0; "
        "assert not {'fsspec', 'aiohttp', 'ray'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=120)


def test_a_half_open_file_does_not_crash_python_at_its_end(tmp_path: Path) -> None:
    """HDF5 reads through Python's file until it is closed, and Python may end before."""
    program = (
        "import fsspec; from hsprobe.remote.location import locate; "
        "from hsprobe.remote.stream import open_hdf5; "
        f"data = open({str(DATA / 'reference.h5')!r}, 'rb').read(); "
        "fsspec.filesystem('memory').pipe_file('/x.h5', data); "
        "file = open_hdf5(locate('memory://x.h5')); print(len(file))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) > 0
