"""Why two dumps of "the same" state differ, one test a trap; those of one producer alone stand beside its
reader.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hsprobe.diagnose import diff
from hsprobe.diagnose.model import Report
from hsprobe.fixtures.dumps import baldeagle, eagle, plain, specforge
from hsprobe.fixtures.dumps.states import Request
from hsprobe.formats.dump import Options, Rows, Sample
from hsprobe.formats.registry import open_dump
from hsprobe.formats.sink import Sink
from hsprobe.formats.stored import stored_array
from hsprobe.trace.reader import Trace
from hsprobe.trace.writer import TraceWriter
from tests.formats.conftest import TRAINED


def names(report: Report) -> list[str]:
    return [finding.name for finding in report.findings]


def said(report: Report) -> str:
    return " ".join([*(f"{f.title} {' '.join(f.evidence)}" for f in report.findings), *report.notes])


def save(folder: Path, **tensors: Any) -> Path:
    (folder / "0").mkdir(parents=True, exist_ok=True)
    torch.save(tensors, folder / "0" / "data_0.ckpt")
    return folder


@pytest.mark.parametrize(("side", "word"), [("pre", "before"), ("post", "after")])
def test_which_side_of_the_final_norm_is_inferred(
    side: str, word: str, requests: list[Request], served_with_final: Path, tmp_path: Path
) -> None:
    if side == "pre":
        requests = [replace(request, final=request.depths[-1]) for request in requests]
    specforge.write(tmp_path / "dump", requests, TRAINED)
    report = diff(tmp_path / "dump", served_with_final)
    assert report.same, report.findings
    assert f"last states are from {word} the final norm, inferred" in said(report)
    assert [line.depth for line in report.layers] == [10 if side == "pre" else "final"]


def test_a_flag_that_is_wrong_about_the_norm_is_contradicted(
    requests: list[Request], served_with_final: Path, tmp_path: Path
) -> None:
    specforge.write(tmp_path / "dump", requests, TRAINED)
    report = diff(tmp_path / "dump", served_with_final, dump=Options(final="pre"))
    assert names(report) == ["DIVERGENCE"]
    assert report.findings[0].title.startswith("the model states differ at depth 10")


def test_index_l_of_transformers_is_after_the_norm(
    requests: list[Request], served_with_final: Path, tmp_path: Path
) -> None:
    """A chunk asked for as the last layer's output holds what follows the final norm instead."""
    depths = [replace(request, depths=[*request.depths[:-1], request.final]) for request in requests]
    specforge.write(tmp_path / "dump", depths, (3, 6, 10))
    report = diff(tmp_path / "dump", served_with_final)
    assert not report.same
    assert [line.trained for line in report.chunks] == [3, 6, "final"]


def test_one_word_for_other_tensors(requests: list[Request], tmp_path: Path) -> None:
    """`hidden_state` is the last state, the chunks, or the chunks on an axis of their own."""
    found = {}
    for name, write in (
        ("specforge", specforge.write),
        ("specforge-server", specforge.write_server),
        ("eagle", eagle.write),
        ("baldeagle", baldeagle.write),
    ):
        write(tmp_path / name, requests, TRAINED)
        dump = open_dump(tmp_path / name)
        assert dump.key == name
        [sample] = [
            s for s in dump.samples() if s.tokens is not None and len(s.tokens) == len(requests[0].tokens)
        ][:1]
        found[name] = {rows.name: rows.width for rows in sample.rows}
    both = {"aux": 384, "final": 128}
    assert found == {
        "specforge": both,
        "specforge-server": both,
        "eagle": {"final": 128},
        "baldeagle": {"aux": 384},
    }


def test_a_training_batch_is_not_a_training_file(
    requests: list[Request], served: Path, tmp_path: Path
) -> None:
    """Trainers shift the ids of a batch to the left; dumped so, each row stands beside the next token."""
    shifted = [
        replace(request, tokens=torch.cat([request.tokens[1:], torch.zeros(1, dtype=torch.int64)]))
        for request in requests
    ]
    baldeagle.write(tmp_path / "dump", shifted, TRAINED)
    report = diff(tmp_path / "dump", served)
    assert "TOKEN_SHIFT" in names(report), said(report)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_short_samples_keep_their_axes(count: int, tmp_path: Path) -> None:
    """One token, three tokens beside three chunks, one chunk: nothing is squeezed away or mistaken."""
    ids, loss = torch.arange(count) + 5, torch.ones(count, dtype=torch.int64)
    states = torch.arange(3 * count * 4, dtype=torch.float32).reshape(3, count, 4)
    wide = states.transpose(0, 1).reshape(1, count, 12)
    folders = {
        "baldeagle": save(tmp_path / "b", input_ids=ids, loss_mask=loss, hidden_state=states),
        "specforge": save(
            tmp_path / "s", input_ids=ids, loss_mask=loss, hidden_state=states[:1], aux_hidden_state=wide
        ),
        "specforge-server": save(
            tmp_path / "v", input_ids=ids[None], loss_mask=loss[None], hidden_state=wide, target=states[:1]
        ),
        "eagle": save(tmp_path / "e", input_ids=ids, loss_mask=loss, hidden_state=states[0]),
    }
    for key, folder in folders.items():
        dump = open_dump(folder)
        assert dump.key == key
        [sample] = dump.samples()
        for rows in sample.rows:
            expected = wide[0] if rows.name == "aux" else states[0]
            assert np.array_equal(rows.read(), expected.numpy()), (key, rows.name)


def test_chunks_in_the_order_of_a_list(requests: list[Request], served: Path, tmp_path: Path) -> None:
    """Producers with hooks keep the order of their list, SGLang's is ascending."""
    specforge.write(tmp_path / "dump", requests, (9, 3, 6))
    report = diff(tmp_path / "dump", served)
    assert names(report)[0] == "CONCAT"
    assert "trained on [8, 2, 5]" in said(report)


def test_padding_is_left_out(requests: list[Request], served: Path, tmp_path: Path) -> None:
    longer = [*requests, replace(requests[0], tokens=torch.arange(1, 23))]
    short = replace(
        requests[0],
        tokens=requests[0].tokens[:9],
        depths=[depth[:9] for depth in requests[0].depths],
        final=requests[0].final[:9],
    )
    specforge.write(tmp_path / "dump", [short, *longer], TRAINED)
    samples = list(open_dump(tmp_path / "dump").samples())
    assert [(len(s.tokens), s.padded) for s in samples if s.tokens is not None][:2] == [(9, 13), (22, 0)]
    assert all(rows.count == 9 for rows in samples[0].rows)
    assert diff(tmp_path / "dump", served).same


def test_a_last_token_of_id_0_in_the_loss_is_no_padding(requests: list[Request], tmp_path: Path) -> None:
    tokens = requests[0].tokens.clone()
    tokens[-1] = 0
    specforge.write(tmp_path / "dump", [replace(requests[0], tokens=tokens)], TRAINED)
    [sample] = open_dump(tmp_path / "dump").samples()
    assert sample.tokens is not None
    assert len(sample.tokens) == len(tokens)


def test_rows_that_a_prefix_cache_left_out_are_missing_not_shifted(
    requests: list[Request], served: Path, tmp_path: Path
) -> None:
    """Only the end of the prompt was computed: rows belong to its last tokens."""
    request, spared = requests[0], 7
    bits = request.aux(TRAINED)[spared:].view(torch.int16).numpy().view(np.uint16)
    rows = Rows("aux", (stored_array("aux", bits, "bfloat16"),), start=spared)
    specforge.write(tmp_path / "dump", requests, TRAINED)
    layout = open_dump(tmp_path / "dump").layout
    with TraceWriter(tmp_path / "t.h5", {"producer": "test"}) as writer:
        sink = Sink(writer, layout)
        sink.add(Sample("one", request.tokens.numpy(), (rows,)))
        sink.finish()
    with Trace.open(tmp_path / "t.h5") as trace:
        assert trace.ranks[0].rows["position"].tolist() == list(range(spared, len(request.tokens)))
    report = diff(tmp_path / "t.h5", served)
    assert report.same
    assert [line.trained for line in report.chunks] == list(TRAINED)


def test_other_token_ids_from_some_position_on(requests: list[Request], served: Path, tmp_path: Path) -> None:
    """Another chat template: compared up to there, and told where the ids part."""
    tokens = requests[0].tokens.clone()
    tokens[9:] = (tokens[9:] + 17) % 200 + 1
    specforge.write(tmp_path / "dump", [replace(requests[0], tokens=tokens)], TRAINED)
    report = diff(tmp_path / "dump", served)
    [drift] = report.coverage.drifts
    assert drift.position == 9
    assert report.coverage.matched == 9


def test_ids_that_differ_from_the_first_on_are_found_all_the_same(
    requests: list[Request], served: Path, tmp_path: Path
) -> None:
    """A token in front, such as a doubled BOS: the sample is found by its other ids, among many."""
    others = [
        replace(
            request, tokens=torch.from_numpy(np.random.default_rng(n).integers(1, 250, len(request.tokens)))
        )
        for n in range(20)
        for request in requests
    ]
    doubled = replace(
        requests[1],
        tokens=torch.cat([requests[1].tokens[:1] + 1, requests[1].tokens]),
        depths=[torch.cat([d[:1], d]) for d in requests[1].depths],
        final=torch.cat([requests[1].final[:1], requests[1].final]),
    )
    specforge.write(tmp_path / "dump", [*others, doubled], TRAINED, pad=False)
    report = diff(tmp_path / "dump", served)
    assert not report.same
    assert any(
        "data_40.ckpt" in drift.train_request for drift in report.coverage.drifts
    ) or "TEMPLATE" in names(report)


def test_fp16_against_bfloat16(requests: list[Request], served_with_final: Path, tmp_path: Path) -> None:
    eagle.write(tmp_path / "dump", requests)
    report = diff(tmp_path / "dump", served_with_final)
    assert report.same, report.findings
    assert [(line.depth, line.ok) for line in report.layers] == [("final", True)]
    assert report.train.dtype == "float16"


def test_fp16_that_overflowed(requests: list[Request], served: Path, tmp_path: Path) -> None:
    """A massive channel beyond 65,504 is infinite in fp16: said, not compared."""
    loud = [d.clone().half() for d in requests[0].depths]
    loud[6][4, 17] = math.inf
    plain.write(tmp_path / "dump", [replace(requests[0], depths=loud)], TRAINED)
    report = diff(tmp_path / "dump", served)
    assert report.chunks[1].nonfinite_train == 1
    assert report.chunks[0].nonfinite_train == 0


def test_a_scaled_last_state_does_not_pass(
    requests: list[Request], served_with_final: Path, tmp_path: Path
) -> None:
    """muP models scale what the head sees; one producer undoes it, another does not."""
    scaled = [replace(request, final=request.final * 0.25) for request in requests]
    specforge.write(tmp_path / "dump", scaled, TRAINED)
    report = diff(tmp_path / "dump", served_with_final)
    assert names(report) == ["DIVERGENCE"]
    assert "final norm" in report.findings[0].title


def test_files_that_are_no_samples_and_the_order_of_the_others(
    requests: list[Request], tmp_path: Path
) -> None:
    many = [requests[i % 2] for i in range(12)]
    specforge.write(tmp_path / "dump", many, TRAINED)
    group = tmp_path / "dump" / "rows_0-2000"
    # A sample with NaN is never written: the gap says nothing.
    (group / "data_5.ckpt").unlink()
    for name in ("data_3.ckpt.lock", "data_4.ckpt.tmp", ".data_6.ckpt", "token_freq.pt"):
        (group / name).write_bytes(b"x")
    dump = open_dump(tmp_path / "dump")
    found = [sample.name for sample in dump.samples()]
    assert found == [f"rows_0-2000/data_{i}.ckpt" for i in range(12) if i != 5]
    assert not dump.skipped


def test_numbers_that_each_worker_begins_anew(requests: list[Request], tmp_path: Path) -> None:
    eagle.write(tmp_path / "dump", [*requests, *requests])
    found = [sample.name for sample in open_dump(tmp_path / "dump").samples()]
    assert len(set(found)) == 4
    assert {name.rpartition("/")[2] for name in found} == {"data_0.ckpt", "data_1.ckpt"}


@pytest.mark.parametrize("stored", [None, "absent"])
def test_old_files_without_chunks(stored: str | None, requests: list[Request], tmp_path: Path) -> None:
    """Once `aux_hidden_state` was None where it had not been asked for, once it was not there at all."""
    group = tmp_path / "dump" / "rows_0-2000"
    group.mkdir(parents=True)
    sample: dict[str, Any] = {
        "input_ids": requests[0].tokens,
        "loss_mask": requests[0].loss_mask,
        "hidden_state": requests[0].final[None],
    }
    torch.save(sample if stored else {**sample, "aux_hidden_state": None}, group / "data_0.ckpt")
    dump = open_dump(tmp_path / "dump")
    assert dump.key == "specforge"
    assert dump.layout.aux is None
    [found] = dump.samples()
    assert [rows.name for rows in found.rows] == ["final"]


def test_layers_named_by_a_flag_are_in_the_producers_numbers(
    requests: list[Request], served: Path, tmp_path: Path
) -> None:
    specforge.write(tmp_path / "s", requests, TRAINED)
    baldeagle.write(tmp_path / "b", requests, TRAINED)
    for folder, ids in (("s", (2, 5, 8)), ("b", TRAINED)):
        report = diff(tmp_path / folder, served, dump=Options(layers=tuple(ids)))
        assert report.same
        assert [line.trained_from for line in report.chunks] == ["declared"] * 3
        assert not any("inferred" in note for note in report.notes)
    # What the flag says is checked like any declaration.
    report = diff(tmp_path / "s", served, dump=Options(layers=(3, 6, 9)))
    assert [line.trained for line in report.chunks] == list(TRAINED)
    assert [line.declared for line in report.chunks] == [4, 7, 10]
