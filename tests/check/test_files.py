"""Folders that nobody vouches for: one sentence, exit code 2, nothing followed or believed."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hsprobe.cli import main
from tests.check.models import DRAFT, TARGET, draft_tensors, write_model, write_safetensors


def _config(text: str | bytes) -> Callable[[Path], None]:
    return lambda draft: (draft / "config.json").write_bytes(text.encode() if isinstance(text, str) else text)


def _weights(data: bytes) -> Callable[[Path], None]:
    return lambda draft: (draft / "model.safetensors").write_bytes(data)


def _header(entries: object) -> Callable[[Path], None]:
    raw = json.dumps(entries).encode()
    return _weights(len(raw).to_bytes(8, "little") + raw + b"\0" * 64)


def _index(weight_map: object) -> Callable[[Path], None]:
    def write(draft: Path) -> None:
        (draft / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return write


def _link(name: str, target: str) -> Callable[[Path], None]:
    def write(draft: Path) -> None:
        (draft / name).unlink(missing_ok=True)
        (draft / name).symlink_to(target)

    return write


def _fifo(draft: Path) -> None:
    (draft / "model.safetensors").unlink()
    os.mkfifo(draft / "model.safetensors")


def _twice(draft: Path) -> None:
    write_safetensors(draft / "more.safetensors", {"fc.weight": [4, 4]})


def _entry(**changes: object) -> object:
    return {"fc.weight": {"dtype": "BF16", "shape": [4, 4], "data_offsets": [0, 32], **changes}}


HOSTILE: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (lambda draft: (draft / "config.json").unlink(), "There is no config.json"),
    "config is a list": (_config("[1, 2]"), "holds a list, not an object"),
    "config is cut short": (_config('{"architectures": ['), "is not JSON"),
    "config is binary": (_config(b"\xff\xfe\x00" * 50), "is not JSON"),
    "config is deep": (_config("[" * 100_000), "is not JSON"),
    "config has a huge number": (_config('{"hidden_size": ' + "9" * 5000 + "}"), "is not JSON"),
    "config is large": (_config(b" " * (5 << 20)), "is larger than 4 MiB"),
    "config is an LFS pointer": (_config("version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
    "config leads out": (_link("config.json", "/etc/hostname"), "leads out of its folder"),
    "config leads to itself": (_link("config.json", "config.json"), "cannot be read"),
    "config is a folder": (_link("config.json", "."), "not a regular file"),
    "weights are empty": (_weights(b""), "is cut short"),
    "weights are text": (_weights(b"hello, world, this is text"), "is cut short"),
    "weights are an LFS pointer": (_weights(b"version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
    "header claims more than there is": (_weights((1 << 40).to_bytes(8, "little") + b"{}"), "is cut short"),
    "header is no JSON": (_weights((4).to_bytes(8, "little") + b"abcd"), "is not JSON"),
    "header is a list": (_header([1]), "not an object"),
    "header is deep": (_weights((90_000).to_bytes(8, "little") + b"[" * 90_000), "is not JSON"),
    "header has a negative size": (_header(_entry(shape=[-4, 4])), "makes no sense"),
    "header has a fractional size": (_header(_entry(shape=[4.5, 4])), "makes no sense"),
    "header has a huge shape": (_header(_entry(shape=[1 << 40, 1 << 40])), "is not its shape"),
    "header leads past the end": (_header(_entry(data_offsets=[0, 1 << 40])), "is cut short"),
    "header runs backwards": (_header(_entry(data_offsets=[32, 0])), "makes no sense"),
    "header lacks offsets": (_header({"fc.weight": {"dtype": "BF16", "shape": [4]}}), "makes no sense"),
    "header's entry is a string": (_header({"fc.weight": "x"}), "makes no sense"),
    "header names what cannot be printed": (
        _header({"a\x1b[31m": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}}),
        "makes no sense",
    ),
    "weights lead out": (_link("model.safetensors", "/etc/hostname"), "leads out of its folder"),
    "weights are a pipe": (_fifo, "is not a regular file"),
    "a tensor is in two files": (_twice, "fc.weight is in"),
    "index has no map": (_index(None), "has no weight_map"),
    "index leads out": (
        _index({"fc.weight": "../target/model.safetensors"}),
        "cannot be one of the folder's",
    ),
    "index leads to a pickle": (_index({"fc.weight": "model.bin"}), "cannot be one of the folder's"),
    "index names a number": (_index({"fc.weight": 3}), "cannot be one of the folder's"),
}


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return (
        write_model(tmp_path / "target", TARGET),
        write_model(tmp_path / "draft", DRAFT, draft_tensors()),
    )


def _run(pair: tuple[Path, Path], *more: str) -> int:
    return main(["check", "--target", str(pair[0]), "--draft", str(pair[1]), *more])


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_folder_is_one_sentence_of_trouble(
    name: str, pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, words = HOSTILE[name]
    spoil(pair[1])
    began = time.process_time()
    assert _run(pair) == 2
    assert time.process_time() - began < 5
    told = capsys.readouterr()
    assert told.out == ""
    assert words in told.err
    assert len(told.err.splitlines()) == 1
    assert "fault in hsprobe" not in told.err


def test_a_pickle_is_never_opened(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    (pair[1] / "model.safetensors").unlink()
    bomb = pair[1] / "pytorch_model.bin"
    bomb.write_bytes(b"cos\nsystem\n(S'touch opened'\ntR.")
    bomb.chmod(0)
    assert _run(pair) == 0
    assert "were not opened: tensors are not checked" in " ".join(capsys.readouterr().out.split())


def test_links_within_a_hub_cache_are_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blobs = tmp_path / "models--x--draft" / "blobs"
    snapshot = tmp_path / "models--x--draft" / "snapshots" / "0a1b"
    real = write_model(blobs, DRAFT, draft_tensors())
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (real / name).rename(real / f"{name}-sha")
        (snapshot / name).symlink_to(f"../../blobs/{name}-sha")
    assert _run((write_model(tmp_path / "target", TARGET), snapshot)) == 0
    assert capsys.readouterr().out.startswith("OK    3 aux chunks will carry depths 2, 4, 6")


def test_shards_are_read_through_the_index(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    (pair[1] / "model.safetensors").unlink()
    tensors = draft_tensors()
    names = sorted(tensors)
    placed = {name: f"model-0000{1 + n % 2}-of-00002.safetensors" for n, name in enumerate(names)}
    for file in set(placed.values()):
        write_safetensors(pair[1] / file, {n: what for n, what in tensors.items() if placed[n] == file})
    _index(placed)(pair[1])
    assert _run(pair) == 0
    assert "15 tensors" not in capsys.readouterr().err


def test_a_large_target_is_not_read_whole(pair: tuple[Path, Path]) -> None:
    """Its index names half a million tensors; no shard of it has to be there to check a draft's ids."""
    placed = {f"model.layers.{n}.mlp.weight": f"model-{n % 100:05}.safetensors" for n in range(200_000)}
    _index(placed)(pair[0])
    began = time.process_time()
    assert _run(pair) == 0
    assert time.process_time() - began < 5
