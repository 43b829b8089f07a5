"""Why two dumps of the same states differ: what each producer does its own way, one test each."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hsprobe.diagnose import diff
from hsprobe.errors import HsprobeError
from hsprobe.fixtures.dumps.states import Request
from hsprobe.formats.dump import UNKNOWN, Dump, Options, Sample
from hsprobe.formats.registry import open_dump
from hsprobe.trace.schema import HEALTH_CHECK_PREFIX, Phase
from tests.formats.producers import DATA, REAL, WITHOUT_CHUNKS, Real, named
from tests.formats.test_real_dumps import opened, rewired, values

CLOSE = 0.02
"""Relative error between two computations of a state in bfloat16."""


def sample_of(dump: Dump, request: Request) -> Sample:
    """The sample that has this request's prompt, its first token aside."""
    prompt = request.tokens[1 : request.prompt].tolist()
    for sample in dump.samples():
        if sample.tokens is not None and sample.tokens[1 : request.prompt].tolist() == prompt:
            return sample
    raise AssertionError("no such sample")


def error(found: np.ndarray, wanted: torch.Tensor) -> float:
    expected = wanted[: len(found)].float().numpy()
    return float((np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)).max())


def copied(path: str, folder: Path) -> Path:
    return Path(shutil.copytree(DATA / path, folder / Path(path).name))


# Layer ids and the final norm


@pytest.mark.parametrize("dump", [one for one in [*REAL, *WITHOUT_CHUNKS] if one.final], ids=named)
def test_the_last_state_is_from_the_side_of_the_norm_that_its_layout_says(
    dump: Real, requests: list[Request]
) -> None:
    found = opened(dump)
    assert found.layout.final is not None
    if dump.key == "torchspec":
        assert found.layout.final.norm is None
    else:
        assert found.layout.final.norm == dump.final
    wanted = requests[0].final if dump.final == "post" else requests[0].depths[-1]
    other = requests[0].depths[-1] if dump.final == "post" else requests[0].final
    rows = values(sample_of(found, requests[0]), "final", 12)
    limit = 0.04 if "fp8" in dump.path else CLOSE
    assert error(rows, wanted) < limit < 0.2 < error(rows, other)


def test_only_what_records_its_layers_is_said_to() -> None:
    recorded = {one.key for one in REAL if (aux := opened(one).layout.aux) and aux.depths}
    assert recorded == {"automodel", "speculators-old"}


def test_the_last_layer_from_transformers_is_the_final_state(
    requests: list[Request], served: Path, tmp_path: Path
) -> None:
    """ModelOpt's script on transformers takes index L of a tuple whose last entry is after the norm."""
    for number, request in enumerate(requests):
        states = [request.depths[3], request.depths[6], request.final]
        write_modelopt(tmp_path, f"{number}", request, torch.cat(states, dim=-1))
    report = diff(tmp_path, rewired(served, tmp_path / "t.h5", (3, 6, 10)))
    assert not report.same
    assert report.chunks[2].trained == "final"


def write_modelopt(folder: Path, name: str, request: Request, aux: torch.Tensor) -> None:
    content = {
        "input_ids": request.tokens,
        "hidden_states": request.final,
        "aux_hidden_states": aux,
        "loss_mask": request.loss_mask,
        "conversation_id": name,
    }
    torch.save(content, folder / f"{name}.pt")


def test_chunks_of_automodel_lie_in_the_order_of_its_ids(served: Path, tmp_path: Path) -> None:
    folder = copied("automodel", tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["aux_layer_ids"] = [8, 2, 5]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    for shard in folder.glob("*.safetensors"):
        content = load_file(shard)
        low, mid, high = content["aux_hidden_states"].chunk(3, dim=-1)
        content["aux_hidden_states"] = torch.cat([high, low, mid], dim=-1)
        save_file(content, shard)
    report = diff(folder, served)
    assert [line.trained for line in report.chunks] == [9, 3, 6]
    assert any(finding.name == "CONCAT" for finding in report.findings), report.findings


def test_modelopts_scripts_are_not_mixed_in_one_reading(tmp_path: Path) -> None:
    shutil.copy(DATA / "modelopt/hf/demo-0.pt", tmp_path / "a.pt")
    shutil.copy(DATA / "modelopt/vllm/demo-1.pt", tmp_path / "b.pt")
    dump = open_dump(tmp_path)
    assert [sample.name for sample in dump.samples()] == ["a.pt"]
    assert dump.skipped[0][0] == "b.pt"
    assert "another of ModelOpt's scripts" in dump.skipped[0][1]


def test_what_tensorrt_llm_leaves_is_read_too(tmp_path: Path) -> None:
    content = torch.load(DATA / "modelopt/trtllm/demo-0.pt")
    raw = {"id": 1, "input_ids": content["input_ids"], "hidden_state": content["hidden_states"]}
    torch.save([raw | {"aux_hidden_states": content["aux_hidden_states"]}], tmp_path / "dp_0_1.pt")
    torch.save([raw | {"hidden_state_features": content["aux_hidden_states"]}], tmp_path / "dp_0_2.pt")
    dump = open_dump(tmp_path)
    assert dump.key == "modelopt"
    assert [sorted(rows.name for rows in one.rows) for one in dump.samples()] == [["aux", "final"]] * 2


# Words, shapes


@pytest.mark.parametrize(("rows", "chunks"), [(1, 3), (1, 1), (12, 1)])
@pytest.mark.parametrize("key", ["modelopt", "speculators", "speculators-old", "automodel", "torchspec"])
def test_an_axis_of_length_one_is_still_an_axis(
    key: str, rows: int, chunks: int, requests: list[Request], tmp_path: Path
) -> None:
    request = requests[0]
    depths = [request.depths[d][:rows] for d in (3, 6, 9)[:chunks]]
    WRITERS[key](tmp_path, request.tokens[:rows], depths, request)
    [sample] = open_dump(tmp_path, Options(format=key)).samples()
    [aux] = [one for one in sample.rows if one.name == "aux"]
    assert (aux.count, aux.width) == (rows, chunks * 128)
    assert error(values(sample, "aux", rows), torch.cat(depths, dim=-1)) == 0


Write = Callable[[Path, torch.Tensor, Sequence[torch.Tensor], Request], None]


def _modelopt(folder: Path, ids: torch.Tensor, depths: Sequence[torch.Tensor], request: Request) -> None:
    final = request.final[: len(ids)]
    content = {"input_ids": ids, "hidden_states": final, "aux_hidden_states": torch.cat([*depths], dim=-1)}
    torch.save(content, folder / "x.pt")


def _speculators(folder: Path, ids: torch.Tensor, depths: Sequence[torch.Tensor], request: Request) -> None:
    states = torch.stack([*depths, request.depths[-1][: len(ids)]], dim=1)
    save_file({"hidden_states": states, "token_ids": ids}, folder / "hs_0.safetensors")


def _old(folder: Path, ids: torch.Tensor, depths: Sequence[torch.Tensor], request: Request) -> None:
    states = [*depths, request.depths[-1][: len(ids)]]
    torch.save({"input_ids": ids, "hidden_states": states, "loss_mask": ids * 0}, folder / "data_0.pt")


def _automodel(folder: Path, ids: torch.Tensor, depths: Sequence[torch.Tensor], request: Request) -> None:
    ids_ = [2, 5, 8][: len(depths)]
    manifest = {
        "format_version": 2, "num_samples": 1, "shard_size": 1, "aux_layer_ids": ids_,
        "aux_hidden_dim": 128 * len(depths),
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest))
    shifted = torch.cat([ids[1:], ids.new_zeros(1)])[None]
    content = {
        "input_ids": shifted,
        "attention_mask": torch.ones_like(shifted),
        "loss_mask": torch.ones_like(shifted) * 1,
        "aux_hidden_states": torch.cat([*depths], dim=-1)[None],
    }
    save_file(content, folder / "shard-000000.safetensors")


def _torchspec(folder: Path, ids: torch.Tensor, depths: Sequence[torch.Tensor], request: Request) -> None:
    batch = {
        "input_ids": ids[None],
        "attention_mask": torch.ones_like(ids)[None],
        "hidden_states": torch.cat([*depths], dim=-1)[None],
        "last_hidden_states": request.final[None, : len(ids)],
    }
    torch.save({"step": 1, "batch_idx": 0, "rank": 0, "batch": batch}, folder / "batch_1_0.pt")


WRITERS: dict[str, Write] = {
    "modelopt": _modelopt,
    "speculators": _speculators,
    "speculators-old": _old,
    "automodel": _automodel,
    "torchspec": _torchspec,
}


def test_the_research_format_of_speculators_has_other_words(
    requests: list[Request], served: Path, tmp_path: Path
) -> None:
    """`hidden_state` holds the chunks and `target` the final state, without a batch axis."""
    for number, request in enumerate(requests):
        content = {"input_ids": request.tokens, "loss_mask": request.loss_mask, "target": request.final}
        torch.save(content | {"hidden_state": request.aux((3, 6, 9))}, tmp_path / f"data_{number}.pt")
    assert open_dump(tmp_path).key == "speculators-old"
    assert diff(tmp_path, served).same


# Shift, padding, missing rows


def test_automodels_ids_are_unshifted_and_its_first_token_comes_from_the_capture(
    requests: list[Request], served: Path
) -> None:
    dump = open_dump(DATA / "automodel")
    sample = sample_of(dump, requests[0])
    assert sample.tokens is not None
    assert sample.tokens.tolist() == [UNKNOWN, *requests[0].tokens[1:22].tolist()]
    assert sample.loss_mask is not None
    assert sample.loss_mask.tolist() == [0] * 12 + [1] * 10
    assert error(values(sample, "aux", 22), requests[0].aux((3, 6, 9))) < CLOSE
    report = diff(DATA / "automodel", served)
    assert report.same
    assert report.coverage.matched >= 42


@pytest.mark.parametrize(("path", "padded"), [("automodel", 48 - 22), ("torchspec", 256 - 22)])
def test_padded_rows_are_left_out(path: str, padded: int, requests: list[Request]) -> None:
    sample = sample_of(open_dump(DATA / path), requests[0])
    assert sample.tokens is not None
    assert len(sample.tokens) == 22
    assert sample.padded == padded
    assert all(rows.count == 22 for rows in sample.rows)


def test_torchspecs_batch_is_not_shifted(requests: list[Request]) -> None:
    sample = sample_of(open_dump(DATA / "torchspec"), requests[0])
    assert sample.tokens is not None
    assert sample.tokens.tolist() == requests[0].tokens[:22].tolist()
    assert error(values(sample, "aux", 22), requests[0].aux((3, 6, 9))) < CLOSE


def test_rows_that_vllms_prefix_cache_spared_are_missing_in_front(
    requests: list[Request], tmp_path: Path
) -> None:
    request = requests[0]
    _speculators(tmp_path, request.tokens, [request.depths[d] for d in (3, 6, 9)], request)
    content = load_file(tmp_path / "hs_0.safetensors")
    content["hidden_states"] = content["hidden_states"][16:].contiguous()
    save_file(content, tmp_path / "hs_0.safetensors")
    [sample] = open_dump(tmp_path).samples()
    assert {rows.start for rows in sample.rows} == {16}
    assert error(values(sample, "aux", 6), request.aux((3, 6, 9))[16:]) == 0


def test_rows_that_a_prefix_cache_spared_an_answer_are_missing_in_front(served: Path, tmp_path: Path) -> None:
    answers = json.loads((DATA / "sglang/responses-aux.json").read_text())
    for answer in answers:
        states = answer["meta_info"]["hidden_states"]
        states[0] = states[0][5:]
    (tmp_path / "x.json").write_text(json.dumps(answers))
    options = Options(format="sglang-aux-responses")
    sample = next(open_dump(tmp_path / "x.json", options).samples())
    assert [rows.start for rows in sample.rows] == [5, 12]
    report = diff(tmp_path / "x.json", served, dump=options)
    assert report.same, report.findings
    assert report.coverage.matched == 2 * 15 - 2 * 5


def test_answers_of_n_tokens_have_one_row_fewer_and_those_of_one_row_have_the_last() -> None:
    options = Options(format="sglang-responses")
    sample = next(open_dump(DATA / "sglang/responses-final.json", options).samples())
    assert sample.tokens is not None
    assert len(sample.tokens) == 16
    assert [(rows.start, rows.count, rows.phase) for rows in sample.rows] == [
        (0, 12, Phase.PREFILL),
        (12, 3, Phase.DECODE),
    ]


def test_an_answer_in_mode_last_is_the_row_of_the_last_token_that_ran(tmp_path: Path) -> None:
    answers = json.loads((DATA / "sglang/responses-final.json").read_text())
    states = answers[0]["meta_info"]["hidden_states"]
    answers[0]["meta_info"]["hidden_states"] = states[-1]
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps(one) for one in answers))
    sample = next(open_dump(tmp_path / "x.jsonl", Options(format="sglang-responses")).samples())
    [rows] = sample.rows
    assert (rows.start, rows.count) == (14, 1)
    assert rows.read()[0].tolist() == states[-1]


def test_an_answer_without_the_ids_that_were_sent_says_what_to_add(tmp_path: Path) -> None:
    answers = json.loads((DATA / "sglang/responses-final.json").read_text())
    del answers[0]["input_ids"]
    (tmp_path / "x.json").write_text(json.dumps(answers[0]))
    dump = open_dump(tmp_path / "x.json", Options(format="sglang-responses"))
    assert not list(dump.samples())
    assert "add them to it as input_ids" in dump.skipped[0][1]


def test_numbers_of_answers_are_the_servers_to_the_bit() -> None:
    """Text carries bfloat16 exactly: nothing is left in the lower half of a float32."""
    sample = next(
        open_dump(DATA / "sglang/responses-aux.json", Options(format="sglang-aux-responses")).samples()
    )
    bits = sample.rows[0].read().view(np.uint32)
    assert not (bits & 0xFFFF).any()
    assert bits.any()


# Tokens, types


def test_a_sample_whose_ids_differ_from_its_data_set_is_left_out(tmp_path: Path) -> None:
    folder = copied("speculators/current", tmp_path)
    path = folder / "hidden_states/hs_1.safetensors"
    content = load_file(path)
    content["token_ids"][3] += 1
    save_file(content, path)
    dump = open_dump(folder)
    assert len(list(dump.samples())) == 2
    assert dump.skipped[0][0] == "hidden_states/hs_1.safetensors"
    assert "row 1 of the data set" in dump.skipped[0][1]


def test_loss_masks_come_from_the_data_set() -> None:
    for sample in open_dump(DATA / "speculators/current").samples():
        assert sample.tokens is not None
        assert sample.loss_mask is not None
        assert len(sample.loss_mask) == len(sample.tokens)
        assert sample.loss_mask[0] == 0 < sample.loss_mask[-1]


def test_without_pyarrow_the_rest_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    dump = open_dump(DATA / "speculators/current")
    assert any("pip install pyarrow" in note for note in dump.layout.notes)
    assert [sample.loss_mask for sample in dump.samples()] == [None] * 3


def test_float8_is_scaled_as_speculators_trainer_scales_it() -> None:
    content = load_file(DATA / "speculators/fp8/hidden_states/hs_0.safetensors")
    values_, scales = content["hidden_states"], content["hidden_states_scales"]
    wanted = values_.to(torch.bfloat16) * scales.to(torch.bfloat16)
    sample = next(open_dump(DATA / "speculators/fp8").samples())
    found = {rows.name: rows.read() for rows in sample.rows}
    together = np.concatenate([found["aux"], found["final"]], axis=1)
    assert np.array_equal(together, wanted.reshape(len(wanted), -1).view(torch.uint16).numpy())
    part = {rows.name: rows.read(5, 7) for rows in sample.rows}
    assert np.array_equal(part["final"], found["final"][5:7])


# SGLang's own dumps


def test_a_pass_holds_nothing_of_the_pass_before(requests: list[Request]) -> None:
    """`model` and `logits_processor` in a file are those of the pass before; the norm's output is its own."""
    content = torch.load(next((DATA / "sglang/passes").rglob("Pass00002.pt")))
    assert len(content["model"]) != len(content["model.norm"][0])
    for request in requests:
        sample = sample_of(open_dump(DATA / "sglang/passes"), request)
        assert error(values(sample, "final", 12), request.final) < CLOSE


def test_rows_of_one_request_are_followed_through_its_passes(requests: list[Request]) -> None:
    sample = sample_of(open_dump(DATA / "sglang/passes"), requests[1])
    assert sample.tokens is not None
    assert sample.tokens.tolist() == requests[1].tokens[:13].tolist()
    states = [rows for rows in sample.rows if rows.name == "layer/006"]
    assert [(rows.start, rows.count, rows.phase) for rows in states] == [
        (0, 12, Phase.PREFILL),
        (12, 1, Phase.DECODE),
    ]
    assert error(values(sample, "layer/006", 13), requests[1].depths[6]) < CLOSE


def test_a_request_that_a_prefix_cache_beheaded_is_left_out(tmp_path: Path) -> None:
    folder = copied("sglang/passes", tmp_path)
    path = next(folder.rglob("Pass00001.pt"))
    content = torch.load(path)
    kept = {key: _without(value, 5) for key, value in content.items()}
    kept["model.forward_batch_info.seq_lens"] = content["model.forward_batch_info.seq_lens"]
    torch.save(kept, path)
    assert [sample.name for sample in open_dump(folder).samples()] == ["TP0_PP0_Rank0_pid1/Pass00005.pt[0]"]


def _without(value: Any, rows: int) -> Any:
    return [one[rows:] for one in value] if isinstance(value, list) else value[rows:]


def test_two_requests_in_one_pass_are_told_apart(tmp_path: Path) -> None:
    """A flat batch of two prefills, then a decode pass of both, in the batch's order."""
    info = "model.forward_batch_info."
    lengths = (3, 4)
    rows = torch.arange(7 * 4, dtype=torch.float32).reshape(7, 4)

    def content(
        states: torch.Tensor, ids: list[int], positions: list[int], ends: list[int]
    ) -> dict[str, Any]:
        return {
            "model.layers.0.input_layernorm": states,
            "model.layers.1.input_layernorm": [states + 100, states],
            f"{info}input_ids": torch.tensor(ids),
            f"{info}positions": torch.tensor(positions),
            f"{info}seq_lens": torch.tensor(ends),
        }

    first = content(rows, [1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 0, 1, 2, 3], [*lengths])
    second = content(rows[:3] + 50, [8, 9, 0], [3, 4, 0], [4, 5])
    torch.save(first, tmp_path / "Pass00000.pt")
    torch.save(second, tmp_path / "Pass00001.pt")
    found = list(open_dump(tmp_path).samples())
    assert [one.tokens.tolist() for one in found if one.tokens is not None] == [[1, 2, 3, 8], [4, 5, 6, 7, 9]]
    assert np.array_equal(values(found[1], "layer/001", 5), torch.cat([rows[3:7], rows[1:2] + 50]).numpy())


def test_the_dumpers_warm_up_and_health_checks_do_not_mix_with_requests(requests: list[Request]) -> None:
    names = list(open_dump(DATA / "sglang/dumper").reader.names())
    stored = {
        torch.load(path, weights_only=False)["value"][0]
        for path in (DATA / "sglang/dumper").rglob("*name=rids___*")
    }
    assert any(rid.startswith(HEALTH_CHECK_PREFIX) for rid in stored)
    assert set(names) == {rid for rid in stored if not rid.startswith(HEALTH_CHECK_PREFIX)}


def test_outputs_of_layers_before_their_reduction_are_not_taken_for_the_stream() -> None:
    assert list((DATA / "sglang/dumper").rglob("*name=non_intrusive__model.layers.3.output___*"))
    sample = next(open_dump(DATA / "sglang/dumper").samples())
    assert {rows.name for rows in sample.rows} == {
        "layer/000", "layer/003", "layer/006", "layer/009", "final",
    }  # fmt: skip


def test_a_dumper_that_kept_no_states_says_how_to_keep_them(tmp_path: Path) -> None:
    folder = copied("sglang/dumper", tmp_path)
    for path in folder.rglob("*non_intrusive*"):
        path.unlink()
    with pytest.raises(HsprobeError, match="DUMPER_NON_INTRUSIVE_MODE=all"):
        open_dump(folder)


def test_answers_with_aux_or_final_states_cannot_be_told_apart_and_are_asked_about() -> None:
    with pytest.raises(HsprobeError, match="--train-format sglang-aux-responses or sglang-responses"):
        open_dump(DATA / "sglang/responses-final.json")


# Files beside the samples


def test_siblings_of_samples_are_not_samples(tmp_path: Path) -> None:
    folder = copied("speculators/current", tmp_path)
    torch.save(torch.ones(256), folder / "token_freq.pt")
    (folder / "hidden_states/hs_7.safetensors.lock").touch()
    dump = open_dump(folder)
    assert len(list(dump.samples())) == 3
    assert not dump.skipped
    cache = copied("automodel", tmp_path)
    save_file({"weight": torch.ones(4, 4)}, cache / "target_embeddings.safetensors")
    (cache / "shard-000002.safetensors.tmp").write_bytes(b"half")
    dump = open_dump(cache)
    assert len(list(dump.samples())) == 3
    assert not dump.skipped


def test_samples_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    folder.mkdir()
    for number in (10, 2, 1):
        shutil.copy(
            DATA / "speculators/current/hidden_states/hs_0.safetensors", folder / f"hs_{number}.safetensors"
        )
    assert list(open_dump(folder).reader.names()) == [f"hs_{n}.safetensors" for n in (1, 2, 10)]


def test_an_unfinished_cache_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    folder = copied("automodel", tmp_path)
    (folder / "shard-000001.safetensors").unlink()
    dump = open_dump(folder)
    assert len(list(dump.samples())) == 2
    assert "1 of 2 shards are there" in dump.layout.notes
