"""Nothing in a dump is trusted: whatever its bytes are, hsprobe reads it or says in one sentence why not."""

import gzip
import io
import json
import os
import pickle
import random
import shutil
import struct
import time
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from hsprobe.cli import main
from hsprobe.errors import HsprobeError
from hsprobe.formats.dump import Options
from hsprobe.formats.registry import formats, open_dump
from tests.formats.producers import REAL, WITHOUT_CHUNKS, Real, named

KEYS = sorted(formats())
DUMPS = [*REAL, *WITHOUT_CHUNKS]
ONE_SECONDS = 20.0
"""Far more than any example takes, also on a busy machine: a hang is minutes."""
some = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def read_all(path: Path, key: str | None) -> int:
    """Read every row of a dump; how many samples could be read. HsprobeError alone may come out."""
    began = time.monotonic()
    try:
        dump = open_dump(path, Options(format=key))
    except HsprobeError as error:
        assert_one_sentence(error.what, error.fix)
        return 0
    count = 0
    for name in dump.reader.names():
        sample = dump.sample(name)
        if sample is None:
            continue
        try:
            for rows in sample.rows:
                rows.read()
        except HsprobeError as error:
            assert_one_sentence(error.what, error.fix)
            continue
        count += 1
    for _, why in dump.skipped:
        assert_one_sentence(why)
    assert time.monotonic() - began < ONE_SECONDS
    return count


def assert_one_sentence(*texts: str) -> None:
    for text in texts:
        assert text.isprintable(), text
        assert "Traceback" not in text
        assert len(text) < 1000


def smallest(dump: Real, folder: Path) -> Path:
    """A copy of a dump, small enough to be spoilt over and over."""
    target = folder / dump.folder.name
    if dump.folder.is_file():
        shutil.copy(dump.folder, target)
        return target
    shutil.copytree(dump.folder, target)
    if dump.key == "sglang-dumper":
        for path in target.rglob("step=1?___*"):
            path.unlink()
    return target


def spoil(path: Path, rng: random.Random) -> None:
    """Flip bytes of one file, cut it, or fill a stretch of it, most often where the structure is."""
    files = sorted(one for one in ([path] if path.is_file() else path.rglob("*")) if one.is_file())
    file = rng.choice(files)
    data = bytearray(file.read_bytes())
    kind = rng.randrange(4)
    if kind == 0 and data:
        del data[rng.randrange(len(data)) :]
    for _ in range(rng.choice((1, 1, 4, 32))):
        if not data:
            break
        near = rng.choice((len(data), min(len(data), 2048), min(len(data), 200)))
        at = rng.randrange(near) if rng.random() < 0.7 else len(data) - 1 - rng.randrange(near)
        if kind == 1:
            data[at] = rng.randrange(256)
        elif kind == 2:
            data[at] ^= 1 << rng.randrange(8)
        else:
            data[at : at + rng.randrange(1, 9)] = bytes([rng.choice((0, 0xFF, 0x7F))]) * rng.randrange(1, 9)
    file.write_bytes(bytes(data))


@pytest.mark.parametrize("dump", DUMPS, ids=named)
def test_spoilt_bytes_of_a_real_dump(dump: Real, tmp_path: Path) -> None:
    for seed in range(12):
        rng = random.Random(f"{dump.path} {seed}")
        folder = tmp_path / str(seed)
        folder.mkdir()
        path = smallest(dump, folder)
        for _ in range(rng.choice((1, 1, 3))):
            spoil(path, rng)
        read_all(path, rng.choice((dump.said, dump.key)))
        shutil.rmtree(folder)


@pytest.mark.parametrize("dump", [one for one in DUMPS if one.key != "sglang-dumper"], ids=named)
def test_a_spoilt_dump_ends_the_command_with_two_or_a_verdict(
    dump: Real, served: Path, tmp_path: Path
) -> None:
    path = smallest(dump, tmp_path)
    rng = random.Random(dump.path)
    flags = ["--train-format", dump.said] if dump.said else []
    for _ in range(3):
        spoil(path, rng)
    for file in [path] if path.is_file() else path.rglob("*"):
        if file.is_file() and rng.random() < 0.7:
            data = file.read_bytes()
            file.write_bytes(data[: len(data) // 3])
    code, said = command("diff", path, served, *flags)
    assert code in (0, 1, 2), said
    assert "Traceback" not in said
    for file in [path] if path.is_file() else path.rglob("*"):
        if file.is_file():
            file.write_bytes(b"\x00" * 64)
    code, said = command("diff", path, served, *flags)
    assert code == 2, said
    assert "Traceback" not in said


def command(*arguments: str | Path) -> tuple[int, str]:
    """(exit code, all that it printed) of hsprobe with these arguments."""
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(out):
        try:
            code = main([str(one) for one in arguments])
        except SystemExit as left:
            code = int(left.code or 0)
    return code, out.getvalue()


# Contents that no producer writes

NAMES = st.sampled_from(
    [
        "input_ids",
        "token_ids",
        "hidden_states",
        "hidden_state",
        "aux_hidden_states",
        "aux_hidden_state",
        "hidden_states_scales",
        "target",
        "loss_mask",
        "attention_mask",
        "last_hidden_states",
        "step",
        "batch_idx",
        "rank",
        "batch",
        "id",
        "conversation_id",
        "value",
        "meta",
        "hidden_state_features",
        "model.norm",
        "model.embed_tokens",
        "model.layers.0.input_layernorm",
        "model.layers.3.input_layernorm",
        "model.forward_batch_info.input_ids",
        "model.forward_batch_info.positions",
        "model.forward_batch_info.seq_lens",
    ]
)
DTYPES = st.sampled_from(
    [torch.bfloat16, torch.float32, torch.int64, torch.float8_e4m3fn, torch.bool, torch.int32, torch.float16]
)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 6]), max_size=4))
    kind = draw(st.sampled_from(["zeros", "count", "minus", "view", "stretched"]))
    base = (
        torch.zeros(shape)
        if kind == "zeros"
        else torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape)
    )
    if kind == "minus":
        base = base - 2
    found = base.to(draw(DTYPES))
    if kind == "view" and found.ndim > 1:
        found = found.transpose(0, 1)
    if kind == "stretched" and found.ndim and found.shape[0] == 1:
        found = found.expand(5, *found.shape[1:])
    return found


VALUES = st.recursive(
    st.one_of(tensors(), st.none(), st.integers(-5, 1 << 40), st.text(max_size=5), st.floats()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(NAMES, inner, max_size=6), st.tuples(inner, inner)
    ),
    max_leaves=8,
)
CONTENTS = st.dictionaries(NAMES, VALUES, max_size=9)


@some
@given(content=CONTENTS, key=st.sampled_from(KEYS), wrapped=st.booleans())
def test_torch_files_of_any_content(content: Any, key: str, wrapped: bool, tmp_path: Path) -> None:
    folder = emptied(tmp_path)
    torch.save([content] if wrapped else content, folder / "Pass00000.pt")
    named_ = "step=0___rank=0___dump_index=1___name={}___recompute_status=disabled.pt"
    if key == "sglang-dumper":
        for name, value in content.items():
            torch.save({"value": value, "meta": {}}, folder / named_.format(name.split(".")[-1]))
    shutil.copy(folder / "Pass00000.pt", folder / "data_0.ckpt")
    read_all(folder, key)
    read_all(folder, None)


@some
@given(
    content=st.dictionaries(NAMES, tensors(), min_size=1, max_size=9),
    key=st.sampled_from(KEYS),
    manifest=st.dictionaries(
        st.sampled_from(
            [
                "format_version",
                "aux_layer_ids",
                "num_samples",
                "shard_size",
                "aux_hidden_dim",
                "target_model",
                "_data_files",
            ]
        ),
        st.one_of(
            st.sampled_from(
                [2, 1, 1 << 39, -1, "x", None, [2, 5, 8], [], [1 << 70], [{"filename": "../x.arrow"}]]
            ),
            st.floats(),
        ),
    ),
)
def test_safetensors_and_manifests_of_any_content(
    content: dict[str, torch.Tensor], key: str, manifest: dict[str, Any], tmp_path: Path
) -> None:
    folder = emptied(tmp_path)
    stored = {name: value.contiguous().clone() for name, value in content.items()}
    save_file(stored, folder / "shard-000000.safetensors")
    for name in ("manifest.json", "state.json", "data_config.json"):
        (folder / name).write_text(json.dumps(manifest))
    read_all(folder, key)
    read_all(folder, None)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.floats(), st.integers(-3, 1 << 70), st.text(max_size=4)),
    lambda inner: st.one_of(st.lists(inner, max_size=5), st.dictionaries(NAMES, inner, max_size=3)),
    max_leaves=12,
)
IDS = st.one_of(st.lists(st.integers(0, 9), max_size=6), JSON)
STATES = st.one_of(
    st.lists(st.one_of(st.lists(st.floats(), max_size=3), st.lists(st.lists(st.floats(), max_size=3)))), JSON
)


@some
@given(
    answers=st.lists(
        st.fixed_dictionaries(
            {
                "input_ids": IDS,
                "output_ids": IDS,
                "meta_info": st.fixed_dictionaries({"hidden_states": STATES}),
            }
        ),
        max_size=3,
    ),
    key=st.sampled_from(["sglang-responses", "sglang-aux-responses"]),
)
def test_answers_of_any_content(answers: list[Any], key: str, tmp_path: Path) -> None:
    folder = emptied(tmp_path)
    (folder / "x.json").write_text(json.dumps(answers))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_all(folder, key)


def emptied(folder: Path) -> Path:
    found = folder / "dump"
    shutil.rmtree(found, ignore_errors=True)
    found.mkdir()
    return found


# Contents made to do harm


class Evil:
    """Whoever unpickles it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


@contextmanager
def harmless(marker: Path) -> Iterator[Evil]:
    yield Evil(marker)
    assert not marker.exists(), "code in the dump was run"


@pytest.mark.parametrize("key", KEYS)
def test_no_code_in_a_dump_is_run(key: str, tmp_path: Path) -> None:
    folder = emptied(tmp_path)
    table = torch.ones(4, 8)
    with harmless(tmp_path / "marker") as evil:
        content = {
            "input_ids": torch.arange(4), "hidden_states": table, "aux_hidden_states": table, "evil": evil,
            "batch": evil, "value": evil, "meta": evil,
        }  # fmt: skip
        for name in ("Pass00000.pt", "data_0.ckpt", "step=0___rank=0___dump_index=1___name=input_ids.pt"):
            torch.save(content, folder / name)
            torch.save(evil, folder / f"b{name}")
        torch.save(content, folder / "old.pt", _use_new_zipfile_serialization=False)
        (folder / "bare.pt").write_bytes(pickle.dumps(evil))
        (folder / "packed.ckpt.gz").write_bytes(gzip.compress(pickle.dumps(evil)))
        np.savez(folder / "x.npz", np.array([evil], dtype=object), allow_pickle=True)
        for name in ("manifest.json", "state.json", "shard-000000.safetensors"):
            (folder / name).write_bytes(pickle.dumps(evil))
        read_all(folder, key)
        read_all(folder, None)
        for path in sorted(folder.iterdir()):
            read_all(path, key)


def _deep_json(path: Path) -> None:
    path.write_text("[" * 200_000)


def _wide_json(path: Path) -> None:
    path.write_text('{"meta_info": {"hidden_states": [[' + "[1]," * 2000 + '[1e400]]]}, "input_ids": [1]}')


def _huge_header(path: Path) -> None:
    path.write_bytes(struct.pack("<Q", 1 << 62) + b"{" + b" " * 64)


def _absurd_shape(path: Path) -> None:
    entry = {"dtype": "BF16", "shape": [1 << 40, 1 << 20, 3], "data_offsets": [0, 8]}
    header = json.dumps({"hidden_states": entry, "token_ids": entry}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\x00" * 8)


def _many_nothings(path: Path) -> None:
    entry = {"dtype": "BF16", "shape": [1 << 40, 0, 3], "data_offsets": [0, 0]}
    ids = {"dtype": "I64", "shape": [1 << 40, 0], "data_offsets": [0, 0]}
    header = json.dumps(
        {
            "aux_hidden_states": entry,
            "hidden_states": entry,
            "input_ids": ids,
            "attention_mask": ids,
            "loss_mask": ids,
        }
    ).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)


@cache
def _packed() -> bytes:
    return gzip.compress(bytes(24 << 20))


@cache
def _zipped() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", b"\x80\x02" + bytes(20 << 20))
        file.writestr("archive/data/0", bytes(20 << 20))
    return out.getvalue()


def _gzip_bomb(path: Path) -> None:
    path.write_bytes(_packed())


def _zip_bomb(path: Path) -> None:
    path.write_bytes(_zipped())


def _endless_link(path: Path) -> None:
    path.symlink_to(path)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _pipe(path: Path) -> None:
    os.mkfifo(path)


HARM = [
    _deep_json, _wide_json, _huge_header, _absurd_shape, _many_nothings, _gzip_bomb, _zip_bomb, _endless_link,
    _device, _pipe,
]  # fmt: skip


@pytest.mark.parametrize("harm", HARM, ids=lambda harm: harm.__name__.strip("_"))
def test_files_made_to_do_harm(harm: Any, tmp_path: Path) -> None:
    """In the place of every file that some reader opens, read with every reader."""
    folder = emptied(tmp_path)
    (tmp_path / "manifest").write_text(
        json.dumps({"format_version": 2, "aux_layer_ids": [1], "num_samples": 1 << 39, "shard_size": 1})
    )
    for name in (
        "a.pt", "Pass00000.pt", "step=0___rank=0___dump_index=1___name=input_ids.pt", "data_0.ckpt",
        "b.ckpt.gz", "x.npz", "shard-000000.safetensors", "hs_0.safetensors", "x.json",
        "state.json", "data_config.json",
    ):  # fmt: skip
        harm(folder / name)
    shutil.copy(tmp_path / "manifest", folder / "manifest.json")
    for key in [*KEYS, None]:
        # Samples of no rows at all are no lie.
        assert read_all(folder, key) == 0 or harm is _many_nothings


def test_no_link_is_followed_out_of_the_folder(tmp_path: Path) -> None:
    """A sample, a manifest and a data set that lie elsewhere are not read, whatever names them."""
    outside = Path(shutil.copytree(REAL[3].folder, tmp_path / "outside"))
    folder = tmp_path / "dump"
    (folder / "hidden_states").mkdir(parents=True)
    shutil.copy(outside / "hidden_states/hs_0.safetensors", folder / "hidden_states/hs_0.safetensors")
    (folder / "hidden_states/hs_1.safetensors").symlink_to(outside / "hidden_states/hs_1.safetensors")
    (folder / "more").symlink_to(outside / "hidden_states")
    for named_ in (f"{outside}/data-00000-of-00001.arrow", "../outside/data-00000-of-00001.arrow"):
        (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": named_}]}))
        dump = open_dump(folder)
        assert [one.name for one in dump.samples()] == ["hidden_states/hs_0.safetensors"]
        assert any("names no files of a data set beside it" in note for note in dump.layout.notes)
    (folder / "state.json").unlink()
    (folder / "state.json").symlink_to(outside / "state.json")
    assert open_dump(folder).layout.notes


def test_memory_stays_flat_whatever_a_file_claims(tmp_path: Path) -> None:
    """Shapes are believed only as far as there are bytes."""
    import resource

    folder = emptied(tmp_path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for write in (_gzip_bomb, _zip_bomb, _absurd_shape, _many_nothings):
        for name in ("a.pt", "b.ckpt.gz", "c.safetensors"):
            write(folder / name)
        for key in KEYS:
            read_all(folder, key)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10


def test_spoilt_arrow_data_sets(tmp_path: Path) -> None:
    original = (REAL[3].folder / "data-00000-of-00001.arrow").read_bytes()
    folder = smallest(REAL[3], tmp_path)
    for seed in range(60):
        rng = random.Random(seed)
        data = bytearray(original)
        for _ in range(rng.choice((1, 2, 8))):
            data[rng.randrange(len(data))] = rng.choice((0, 1, 0xFF, rng.randrange(256)))
        (folder / "data-00000-of-00001.arrow").write_bytes(bytes(data))
        read_all(folder, "speculators")
