"""Any dump becomes a trace or safetensors with the bits it had; an interrupted conversion goes on where it
was.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from hsprobe.cli import main
from hsprobe.diagnose import diff
from hsprobe.errors import HsprobeError
from hsprobe.fixtures.dumps import plain, specforge
from hsprobe.fixtures.dumps.states import Request
from hsprobe.formats import convert, tensors_out
from hsprobe.formats.dump import Options
from hsprobe.formats.registry import open_dump
from hsprobe.trace.context import context_hashes
from hsprobe.trace.reader import Trace
from tests.formats.conftest import TRAINED


@pytest.fixture
def dump(requests: list[Request], tmp_path: Path) -> Path:
    """Twelve samples as SpecForge writes them: those of the reference, from the first token to some other."""
    cut = [_cut(request, n) for n in range(8, 14) for request in requests]
    specforge.write(tmp_path / "dump", cut, TRAINED, pad=False)
    return tmp_path / "dump"


def _cut(request: Request, n: int) -> Request:
    return Request(
        request.tokens[:n], [d[:n] for d in request.depths], request.final[:n], min(n, request.prompt)
    )


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def test_a_trace_has_the_bits_and_contexts_of_the_dump(dump: Path, tmp_path: Path) -> None:
    outcome = convert.to_trace(open_dump(dump), tmp_path / "out.h5")
    assert (outcome.samples, outcome.rows, outcome.skipped) == (12, 2 * sum(range(8, 14)), [])
    with Trace.open(tmp_path / "out.h5") as trace:
        rank = trace.ranks[0]
        for r, name in enumerate(trace.requests.ids):
            original = torch.load(dump / name, weights_only=True)
            rows = np.flatnonzero(rank.rows["request"] == r)
            assert trace.requests.tokens(r).tolist() == original["input_ids"].tolist()
            assert rank.rows["context"][rows].tolist() == context_hashes(original["input_ids"].tolist())
            for site, key in (("aux", "aux_hidden_state"), ("final", "hidden_state")):
                tensor = rank.tensors[site]
                found = tensor.read_raw(np.flatnonzero(np.isin(tensor.row_index, rows)))
                assert found.tobytes() == bits(original[key])
        # What the dump does not record is not made up.
        assert rank.tensors["aux"].depths is None
        assert rank.tensors["aux"].chunks == 3


def test_a_converted_dump_compares_as_the_dump_itself(
    requests: list[Request], served: Path, tmp_path: Path
) -> None:
    specforge.write(tmp_path / "dump", requests, [d - 1 for d in TRAINED])
    convert.to_trace(open_dump(tmp_path / "dump"), tmp_path / "out.h5")
    one, other = diff(tmp_path / "dump", served), diff(tmp_path / "out.h5", served)
    assert [f.title for f in one.findings] == [f.title for f in other.findings]
    assert [f.evidence for f in one.findings] == [f.evidence for f in other.findings]


def test_layers_that_a_flag_names_are_declared(requests: list[Request], tmp_path: Path) -> None:
    specforge.write(tmp_path / "dump", requests, TRAINED)
    convert.to_trace(open_dump(tmp_path / "dump", Options(layers=(2, 5, 8))), tmp_path / "out.h5")
    with Trace.open(tmp_path / "out.h5") as trace:
        assert trace.ranks[0].tensors["aux"].depths == list(TRAINED)


def test_an_interrupted_conversion_goes_on(
    dump: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "PART_SAMPLES", 3)
    convert.to_trace(open_dump(dump), tmp_path / "whole.h5")

    def die(done: int, total: int) -> None:
        if done == 8:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        convert.to_trace(open_dump(dump), tmp_path / "out.h5", told=die)
    assert not (tmp_path / "out.h5").exists()
    seen: list[int] = []
    outcome = convert.to_trace(open_dump(dump), tmp_path / "out.h5", told=lambda done, _: seen.append(done))
    assert (outcome.kept, outcome.samples, seen[0]) == (6, 12, 7)
    assert not list(tmp_path.glob("*.parts"))
    with Trace.open(tmp_path / "out.h5") as one, Trace.open(tmp_path / "whole.h5") as other:
        assert one.requests.ids == other.requests.ids
        assert len(set(one.requests.ids)) == 12
        for name, tensor in one.ranks[0].tensors.items():
            same = other.ranks[0].tensors[name]
            assert tensor.read_raw().tobytes() == same.read_raw().tobytes()
        for name, column in one.ranks[0].rows.items():
            assert (column == other.ranks[0].rows[name]).all()


def test_an_interruption_keeps_what_was_done(dump: Path, tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done == 5:
            import signal

            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        convert.to_trace(open_dump(dump), tmp_path / "out.h5", told=stop)
    assert convert.to_trace(open_dump(dump), tmp_path / "out.h5").kept == 5


def test_a_conversion_is_not_continued_with_another_dump(
    dump: Path, requests: list[Request], tmp_path: Path
) -> None:
    folder = tmp_path / "out.h5.parts"
    folder.mkdir()
    (folder / "conversion.json").write_text('{"dump": "elsewhere"}')
    with pytest.raises(HsprobeError, match="something else"):
        convert.to_trace(open_dump(dump), tmp_path / "out.h5")


def test_a_sample_that_cannot_be_read_is_named_and_left_out(dump: Path, tmp_path: Path) -> None:
    bad = dump / "rows_0-2000" / "data_3.ckpt"
    bad.write_bytes(bad.read_bytes()[:500])
    outcome = convert.to_trace(open_dump(dump), tmp_path / "out.h5")
    assert outcome.samples == 11
    assert [name for name, _ in outcome.skipped] == ["rows_0-2000/data_3.ckpt"]
    odd = torch.load(dump / "rows_0-2000" / "data_4.ckpt", weights_only=True)
    torch.save({**odd, "aux_hidden_state": odd["aux_hidden_state"].float()}, dump / "rows_0-2000/data_4.ckpt")
    outcome = convert.to_trace(open_dump(dump), tmp_path / "out.h5")
    assert "float32, that of the samples before it" in outcome.skipped[1][1]


def test_safetensors_and_back(dump: Path, tmp_path: Path) -> None:
    convert.to_trace(open_dump(dump, Options(layers=(2, 5, 8))), tmp_path / "a.h5")
    with Trace.open(tmp_path / "a.h5") as trace:
        tensors_out.from_trace(trace, tmp_path / "tensors")
    back = open_dump(tmp_path / "tensors")
    assert back.key == "plain"
    assert back.layout.aux is not None
    assert back.layout.aux.depths == TRAINED
    samples = list(back.samples())
    assert len(samples) == 12
    for sample in samples:
        original = torch.load(dump / sample.name.removesuffix(".safetensors"), weights_only=True)
        assert sample.tokens is not None
        assert sample.tokens.tolist() == original["input_ids"].tolist()
        found = {rows.name: rows.read().tobytes() for rows in sample.rows}
        assert found["aux"] == bits(original["aux_hidden_state"])
        assert found["final"] == bits(original["hidden_state"])


def test_a_capture_as_safetensors_compares_with_itself(served: Path, tmp_path: Path) -> None:
    with Trace.open(served) as trace:
        tensors_out.from_trace(trace, tmp_path / "tensors")
    report = diff(tmp_path / "tensors", served)
    assert report.same
    assert all(line.error == 0 for line in [*report.chunks, *report.layers])


def test_the_command(dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(dump), str(tmp_path / "out.h5")]) == 0
    said = capsys.readouterr()
    assert "12 samples, 126 rows" in said.out
    assert "SpecForge offline, 12 samples, layer ids not recorded" in said.err
    assert main(["convert", str(tmp_path / "out.h5"), str(tmp_path / "tensors")]) == 0
    assert len(list((tmp_path / "tensors").rglob("*.safetensors"))) == 12
    assert main(["convert", str(tmp_path / "out.h5"), str(tmp_path / "again.h5")]) == 2
    assert "is a trace already" in capsys.readouterr().err


def test_inspect(
    dump: Path, requests: list[Request], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(dump)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "SpecForge offline" in shown
    assert "samples 12" in shown
    assert (
        "layers not recorded (aux_hidden_state_layer_ids, where an id names the output of its layer)" in shown
    )
    assert "after the final norm (the producer's default)" in shown
    plain.write_hdf5(tmp_path / "x.h5", requests, TRAINED)
    assert main(["inspect", str(tmp_path / "x.h5")]) == 2
    said = capsys.readouterr().err
    assert "samples/0/ids" in said
    assert "--map input_ids=" in said
    assert (
        main(["inspect", str(tmp_path / "x.h5"), *(f"--map={k}={v}" for k, v in plain.GROUPS.items())]) == 0
    )
    assert "samples 2" in " ".join(capsys.readouterr().out.split())
