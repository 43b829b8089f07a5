"""What the producers' own code wrote, read and compared with a real server of the same model."""

from collections.abc import Sequence
from pathlib import Path

import h5py
import ml_dtypes
import numpy as np
import pytest

from hsprobe.diagnose import diff
from hsprobe.diagnose.model import Report
from hsprobe.formats.dump import Dump, Options, Sample
from hsprobe.formats.registry import open_dump
from hsprobe.trace.reader import Trace
from hsprobe.trace.writer import TraceWriter
from tests.formats.producers import REAL, WITHOUT_CHUNKS, Real, named

each = pytest.mark.parametrize("dump", REAL, ids=named)
every = pytest.mark.parametrize("dump", [*REAL, *WITHOUT_CHUNKS], ids=named)
COARSE = 0.04
"""Of a float8 with one scale for a row: half a step of 2**-3, twice that for the second rounding."""


def opened(dump: Real) -> Dump:
    return open_dump(dump.folder, Options(format=dump.said))


def compared(dump: Real, capture: Path) -> Report:
    return diff(dump.folder, capture, dump=Options(format=dump.said))


def rewired(served: Path, target: Path, depths: Sequence[int]) -> Path:
    """The capture as of a server that hands over other depths: its own states of those, its own account."""
    with Trace.open(served) as trace:
        rank = trace.ranks[0]
        known = trace.provenance
        ids = [depth - 1 for depth in depths]
        known["aux"]["depths"] = list(depths)
        known["draft"]["aux_layer_ids"] = ids
        known["draft"]["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = ids
        with TraceWriter(target, known) as writer:
            writer.add_rank(0, rank.coords)
            writer.add_passes(0, rank.passes)
            writer.append_rows(0, rank.rows)
            layers = [rank.tensors[f"layer/{depth:03d}"] for depth in depths]
            for name, tensor in rank.tensors.items():
                bits = tensor.read_raw()
                if name == "aux":
                    bits = np.concatenate([layer.read_raw() for layer in layers], axis=1)
                attributes = {"site": tensor.site, "dtype": tensor.dtype, "depth": tensor.depth}
                if name == "aux":
                    attributes |= {"depths": list(depths), "chunks": len(depths)}
                writer.append(0, name, bits, tensor.row_index, **attributes)
            requests = range(len(trace.requests))
            writer.set_requests(
                trace.requests.ids, [trace.requests.tokens(r) for r in requests], trace.requests.prompt_len
            )
    return target


def values(sample: Sample, name: str, count: int) -> np.ndarray:
    """The first rows of a tensor, all phases in order. -> [count, W] float32"""
    found = sorted((rows for rows in sample.rows if rows.name == name), key=lambda rows: rows.start)
    parts = [
        rows.read().view(getattr(ml_dtypes, rows.dtype)) if rows.dtype == "bfloat16" else rows.read()
        for rows in found
    ]
    return np.concatenate([part.astype(np.float32) for part in parts])[:count]


@every
def test_it_is_recognised_by_what_is_in_it(dump: Real) -> None:
    found = opened(dump)
    assert found.key == dump.key
    samples = list(found.samples())
    assert samples
    assert not found.skipped
    assert all(sample.tokens is not None for sample in samples)


@pytest.mark.parametrize("dump", [one for one in REAL if one.key != "automodel"], ids=named)
def test_its_rows_are_the_states_at_these_depths(dump: Real, served: Path) -> None:
    """Against the server's own states, to bfloat16's precision: no row is shifted, no chunk is exchanged."""
    with Trace.open(served) as trace:
        rank = trace.ranks[0]
        first = trace.requests.tokens(0)
        rows = [
            int(np.flatnonzero((rank.rows["request"] == 0) & (rank.rows["position"] == p))[0])
            for p in range(12)
        ]
        wanted = []
        for depth in dump.trained:
            tensor = rank.tensors[f"layer/{depth:03d}"]
            wanted.append(
                tensor.read(np.array([int(np.flatnonzero(tensor.row_index == r)[0]) for r in rows]))
            )
    [sample] = [
        one
        for one in opened(dump).samples()
        if one.tokens is not None and one.tokens[:12].tolist() == first[:12].tolist()
    ]
    found = values(sample, "aux", 12)
    expected = np.concatenate(wanted, axis=1)
    errors = np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert errors.max() < (COARSE if "fp8" in dump.path else 0.02)


@each
def test_the_right_wiring_passes(dump: Real, served: Path, tmp_path: Path) -> None:
    capture = served if dump.trained == (3, 6, 9) else rewired(served, tmp_path / "t.h5", dump.trained)
    report = compared(dump, capture)
    assert report.same, report.findings
    assert [line.trained for line in report.chunks] == list(dump.trained)
    assert report.coverage.matched >= 28


@each
def test_off_by_one_is_named_in_the_producers_own_numbers(dump: Real, served: Path, tmp_path: Path) -> None:
    depths = [depth - 1 for depth in dump.trained]
    report = compared(dump, rewired(served, tmp_path / "t.h5", depths))
    assert not report.same
    [finding] = [found for found in report.findings if found.name == "LAYER_SHIFT"]
    said = " ".join([finding.title, *finding.evidence])
    assert f"({dump.setting})" in said
    assert f"trained on {list(dump.ids)}" in said
    assert f"served {[one - 1 for one in dump.ids]}" in said


def test_the_same_flag_means_other_layers_to_modelopts_vllm_script(served: Path) -> None:
    """All three scripts were run with --aux-layers 2,5,8: one of them stored the inputs of those layers."""
    report = compared(next(one for one in REAL if one.key == "modelopt-vllm"), served)
    [finding] = [found for found in report.findings if found.name == "LAYER_SHIFT"]
    said = " ".join([finding.title, *finding.evidence])
    assert "trained on [2, 5, 8]" in said
    assert "served [3, 6, 9]" in said


@pytest.mark.parametrize("dump", WITHOUT_CHUNKS, ids=named)
def test_a_dump_of_states_alone_matches_those_of_the_capture(dump: Real, served: Path) -> None:
    report = compared(dump, served)
    assert report.same, report.findings


def test_a_capture_file_is_left_as_it_was(served: Path) -> None:
    with h5py.File(served) as file:
        assert file.attrs["state"] == b"complete"
