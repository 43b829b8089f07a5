"""Every rule, planted in a pair of models that is otherwise clean, and the clean pair."""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsprobe.check.model import CheckReport, Severity
from hsprobe.check.registry import catalogue
from hsprobe.check.run import check
from tests.check.models import DRAFT, KEPT, TARGET, H, draft_tensors, write_model, write_safetensors
from tests.synthetic import World, write_train


@dataclass
class Pair:
    """A clean pair, to be spoilt."""

    target: dict[str, Any] = field(default_factory=lambda: copy.deepcopy(TARGET))
    draft: dict[str, Any] = field(default_factory=lambda: copy.deepcopy(DRAFT))
    tensors: dict[str, Any] | None = field(default_factory=draft_tensors)
    version: str = "0.5.23"
    algorithm: str | None = None
    train: Callable[[Path], Path] | None = None
    after: Callable[[Path], None] = lambda folder: None

    def ids(self, *ids: object) -> None:
        self.draft["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = list(ids)

    def held(self) -> dict[str, Any]:
        assert self.tensors is not None
        return self.tensors

    def dflash(self, *ids: int) -> None:
        self.draft.pop("eagle_config")
        self.draft.pop("draft_vocab_size")
        self.draft |= {"architectures": ["DFlashDraftModel"], "num_hidden_layers": 3}
        self.draft["dflash_config"] = {"target_layer_ids": list(ids)}
        self.tensors = {"fc.weight": [H, len(ids) * H]}

    def check(self, folder: Path) -> CheckReport:
        target = write_model(folder / "target", self.target)
        draft = write_model(folder / "draft", self.draft, self.tensors)
        self.after(draft)
        train = None if self.train is None else self.train(folder / "train.h5")
        return check(target, draft, train=train, version=self.version, algorithm=self.algorithm)


def _set(**keys: object) -> Callable[[Pair], None]:
    return lambda pair: pair.draft.update(keys)


def _ids(
    *ids: object, architecture: str = "LlamaForCausalLM", version: str = "0.5.23"
) -> Callable[[Pair], None]:
    def spoil(pair: Pair) -> None:
        pair.ids(*ids)
        pair.target["architectures"] = [architecture]
        pair.version = version

    return spoil


def _in(version: str) -> Callable[[Pair], None]:
    return lambda pair: setattr(pair, "version", version)


def _served(algorithm: str) -> Callable[[Pair], None]:
    return lambda pair: setattr(pair, "algorithm", algorithm)


def _tensor(name: str, what: Any) -> Callable[[Pair], None]:
    def spoil(pair: Pair) -> None:
        if what is None:
            del pair.held()[name]
        else:
            pair.held()[name] = what

    return spoil


def _dflash(*ids: int, **keys: object) -> Callable[[Pair], None]:
    def spoil(pair: Pair) -> None:
        pair.dflash(*ids)
        pair.draft |= keys

    return spoil


def _trained(*depths: int, declare: bool | None = True, **world: Any) -> Callable[[Pair], None]:
    def write(path: Path) -> Path:
        return write_train(path, depths, world=World(**{"dtype": "bfloat16", **world}), declare=declare)

    return lambda pair: setattr(pair, "train", write)


def _at_the_top(pair: Pair) -> None:
    pair.draft["eagle_aux_hidden_state_layer_ids"] = [3, 5, 7]
    del pair.draft["eagle_config"]


def _named_in_an_index(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"fc.weight": "a.safetensors"}}')


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80")


def _called_layers(pair: Pair) -> None:
    pair.version = "0.5.9"
    pair.tensors = {name.replace("midlayer", "layers.0"): what for name, what in pair.held().items()}


def _aux_off(pair: Pair) -> None:
    pair.draft["eagle_config"]["use_aux_hidden_state"] = False


def _one_chunk(pair: Pair) -> None:
    pair.ids(3)
    pair.held()["fc.weight"] = [H, H]


def _four_chunks(pair: Pair) -> None:
    pair.ids(1, 3, 5, 6)
    pair.version = "0.5.9"


def _nested_rope(pair: Pair) -> None:
    pair.draft["rope_parameters"] = {"rope_type": "default", "rope_theta": pair.draft.pop("rope_theta")}
    pair.version = "0.5.9"


def _in_eagle_config(**keys: object) -> Callable[[Pair], None]:
    return lambda pair: pair.draft["eagle_config"].update(keys)


def _without(key: str) -> Callable[[Pair], None]:
    return lambda pair: pair.draft.pop(key)


def _plain(pair: Pair) -> None:
    """No more of a draft than any model."""
    for key in ("eagle_config", "draft_vocab_size"):
        del pair.draft[key]
    pair.tensors = {"model.embed_tokens.weight": [96, H]}


def _after(change: Callable[[Path], None]) -> Callable[[Pair], None]:
    return lambda pair: setattr(pair, "after", change)


def _stored_as(dtype: str) -> Callable[[Path], None]:
    return lambda folder: write_safetensors(folder / "model.safetensors", {"fc.weight": [H, 3 * H]}, dtype)


def _both(*changes: Callable[[Pair], None]) -> Callable[[Pair], None]:
    def spoil(pair: Pair) -> None:
        for change in changes:
            change(pair)

    return spoil


_OFFSETS = KEPT - np.arange(len(KEPT))
_SWAPPED = np.concatenate([KEPT[:20][::-1], KEPT[20:]]) - np.arange(len(KEPT))

PLANTS: list[tuple[str, Callable[[Pair], None], str]] = [
    ("CK101", _ids(-1, 3, 5), "id -1 puts the embedding output (depth 0) into chunk 0"),
    ("CK101", _ids(0, 3, 5, architecture="DeepseekV3ForCausalLM"), "id 0 puts the embedding"),
    (
        "CK101",
        _ids(-1, 3, 5, version="0.5.9"),
        "at which SGLang 0.5.9 stops: its first forward raises TypeError",
    ),
    ("CK101", _ids(-1, 3, 5, architecture="Qwen3ForCausalLM", version="0.5.9"), "id -1 puts the embedding"),
    ("CK102", _at_the_top, "it will capture its default, depths 2, 4, 6"),
    (
        "CK102",
        _both(_dflash(1, 3), _set(dflash_config={}, eagle_config={"layer_ids": [1, 3]})),
        "layer_ids [1, 3]",
    ),
    ("CK103", _in_eagle_config(eagle_aux_hidden_state_layer_ids=None), "depths 2, 4, 6"),
    ("CK103", _both(_dflash(1, 3), _set(dflash_config={})), "no layer ids in dflash_config.target_layer_ids"),
    ("CK104", _ids("1", 3, 5), "['1', 3, 5], which is not a list of integers"),
    ("CK104", _ids(), "empty list"),
    ("CK105", _ids(2, 4, 6), "reads them as layer outputs: depths 3, 5, 7"),
    ("CK106", _ids(1, 3, 8), "output of the last layer (depth 9)"),
    ("CK106", _ids(1, 3, 8, architecture="Qwen3MoeForCausalLM"), "IndexError"),
    ("CK106", _ids(3, 5, 9, architecture="DeepseekV3ForCausalLM"), "RuntimeError"),
    ("CK107", _ids(1, 1, 5), "ask for depth 2 more than once"),
    ("CK108", _ids(5, 1, 3), "ascending order: depths 2, 4, 6"),
    ("CK109", _ids(2, 4, 7, architecture="DeepseekV3ForCausalLM"), "0.5.9: 3, 5, 8"),
    ("CK110", _ids(1, 3, 5, architecture="Gemma3ForCausalLM", version="0.5.9"), "no working"),
    (
        "CK110",
        _ids(1, 3, 5, architecture="Qwen3_5ForConditionalGeneration", version="0.5.15.post1"),
        "stores the ids where no layer reads them",
    ),
    ("CK111", _ids(1, 3, 5, architecture="SomeFutureForCausalLM"), "SomeFutureForCausalLM"),
    ("CK112", _ids(1, 3, 6, version="0.5.9"), "records its CUDA graphs with depths 2, 4, 6"),
    (
        "CK112",
        _ids(1, 3, 6, architecture="Qwen3MoeForCausalLM", version="0.5.9"),
        "prefill then hands over both, 4 chunks: 2, 4, 6, 7",
    ),
    ("CK113", _aux_off, "the draft gets the final state and skips fc"),
    ("CK114", _ids(1, 3, 5, architecture="GptOssForCausalLM", version="0.5.15.post1"), "fused all-reduce"),
    ("CK201", _served("EAGLE"), "EAGLE hands it the final state"),
    ("CK202", _served("DFLASH"), "made for EAGLE3, not for DFLASH"),
    ("CK203", _set(architectures=["LlamaForCausalLM"]), "no EAGLE-3 draft class LlamaForCausalLM"),
    (
        "CK203",
        _both(_set(architectures=["Eagle3DeepseekV2ForCausalLM"]), _in("0.5.9")),
        "has no",
    ),
    (
        "CK204",
        _both(_dflash(1, 3), _in("0.5.9")),
        "SGLang 0.5.9 has no DFLASH",
    ),
    ("CK205", _both(_set(num_hidden_layers=2), _in("0.5.9")), "runs 1"),
    ("CK205", _tensor("layers.1.mlp.up_proj.weight", [128, H]), "num_hidden_layers is 1"),
    (
        "CK206",
        _both(_set(architectures=["LlamaForCausalLM"]), _plain),
        "nothing marks LlamaForCausalLM as a draft",
    ),
    ("CK301", _tensor("fc.weight", [H, 4 * H]), "takes 4 chunks of 64, and the target hands over 3"),
    ("CK302", _set(target_hidden_size=128), "target_hidden_size is 128, and the target is 64 wide"),
    ("CK302", _set(hidden_size=128), "the draft has no target_hidden_size"),
    ("CK303", _one_chunk, "its fc will be skipped"),
    ("CK304", _four_chunks, "builds fc for 3 chunks"),
    ("CK304", _set(num_aux_hidden_states=4), "num_aux_hidden_states is 4"),
    ("CK401", _set(vocab_size=95), "vocab_size is 95, the target's 96"),
    ("CK402", _tensor("d2t", None), "has no d2t"),
    ("CK403", _tensor("d2t", _OFFSETS[:40]), "[40], and the draft has 48 tokens"),
    ("CK403", _tensor("d2t", [48]), "d2t is BF16, not I64"),
    ("CK404", _tensor("d2t", KEPT), "it looks like the target's ids themselves"),
    ("CK405", _tensor("d2t", np.arange(48)), "not offsets"),
    ("CK405", _tensor("d2t", _SWAPPED), "the target ids fall"),
    ("CK405", _tensor("d2t", np.zeros(48, np.int64) - np.eye(48, dtype=np.int64)[9]), "that another has"),
    ("CK405", _tensor("d2t", np.zeros(48, np.int64)), "all zeros"),
    ("CK406", _tensor("t2d", np.arange(96) < 48), "tokens that t2d does not mark"),
    ("CK406", _tensor("t2d", np.arange(96) < 40), "t2d marks 40 tokens"),
    ("CK406", _tensor("t2d", np.arange(90) < 48), "t2d has 90 entries"),
    ("CK407", _without("draft_vocab_size"), "no draft_vocab_size"),
    ("CK408", _set(tie_word_embeddings=True), "has an lm_head.weight [48, 64] of its own"),
    ("CK409", _tensor("embed_tokens.weight", [96, H]), "replaced by the target's"),
    ("CK410", _set(hidden_size=128, target_hidden_size=64), "needs an embed_tokens.weight of its own"),
    ("CK501", _set(rope_theta=10000.0), "rope_theta is 10000, the target's 500000"),
    ("CK501", _without("rope_theta"), "no rope_theta"),
    ("CK502", _set(rope_scaling={"rope_type": "linear", "factor": 2.0}), "the target's none"),
    ("CK503", _set(max_position_embeddings=2048), "ends at 2048 tokens, the target's at 4096"),
    ("CK504", _nested_rope, "SGLang 0.5.9 takes 10000"),
    ("CK504", _set(rope_parameters={"rope_theta": 10000.0}), "takes 10000"),
    ("CK505", _set(sliding_window=512), "sliding_window is 512"),
    ("CK601", _tensor("input_norm.weight", [3 * H]), "norm_before_fc is not set"),
    ("CK601", _in_eagle_config(norm_before_fc=True), "no input_norm.weight"),
    ("CK601", _both(_set(norm_before_fc=True), _in("0.5.15.post1")), "does not know it"),
    ("CK602", _tensor("fc_norm.0.weight", [H]), "fc_norm is not set"),
    ("CK602", _tensor("aux_norm_low.weight", [H]), "fc_norm is not set"),
    ("CK602", _in_eagle_config(fc_norm=True), "it stands in eagle_config"),
    ("CK602", _set(fc_norm=True), "no fc_norm weights"),
    ("CK602", _both(_set(use_aux_norm=True), _in("0.5.9")), "does not know it"),
    ("CK603", _both(_set(norm_output=True), _in("0.5.9")), "does not know it"),
    ("CK603", _in_eagle_config(norm_output=True), "does not read it"),
    ("CK604", _set(norm_before_residual=True), "takes the residual before the norm"),
    ("CK605", _tensor("midlayer.self_attn.q_proj.bias", [64]), "will not be loaded"),
    ("CK605", _tensor("fc.bias", [H]), "bias is not set"),
    ("CK701", _after(_pickled), "pickled (pytorch_model.bin)"),
    ("CK702", _after(_named_in_an_index), "a.safetensors, which is not in its folder"),
    ("CK703", _tensor("midlayer.hidden_norm.weight", None), "layers.0.hidden_norm.weight"),
    ("CK703", _tensor("norm.weight", None), "1 tensor of the draft"),
    ("CK704", _called_layers, "loads midlayer.*"),
    ("CK705", _tensor("midlayer.self_attn.q_norm.weight", [16]), "will not be loaded"),
    ("CK706", _tensor("fc.weight", [3 * H, H]), "fc.weight is stored transposed"),
    ("CK706", _tensor("midlayer.mlp.up_proj.weight", [64, H]), "the config asks for [128, 64]"),
    ("CK707", _without("torch_dtype"), "no dtype, so it runs in float16; the target runs in bfloat16"),
    ("CK707", _set(torch_dtype="float32"), "runs in float16"),
    ("CK708", _after(_stored_as("F32")), "stored in float32 and runs in bfloat16"),
    ("CK709", _after(_stored_as("F8_E4M3")), "no quantization_config"),
    ("CK801", _trained(3, 5, 7), "trained on depths 3, 5, 7 (outputs of layers 2, 4, 6)"),
    ("CK802", _trained(6, 2, 4), "in this order"),
    ("CK803", _trained(2, 4, 6, width=128), "hidden size of the target is 64"),
    ("CK804", _trained(2, 4, 6, declare=None), "does not say which depths"),
    ("CK805", _trained(2, 4, 6, dtype="float32"), "computed in float32"),
    ("CK901", _dflash(1, 3, 9), "names [9], and the target has layers 0 to 8"),
    ("CK902", _dflash(1, 3, hidden_size=128), "the draft is 128 wide, the target 64"),
    ("CK903", _dflash(1, 3, num_target_layers=36), "36, and the target has 9 layers"),
    ("CK904", _set(dflash_config={"target_layer_ids": [1, 3]}), "EAGLE3 reads eagle_config"),
    ("CK905", _both(_set(architectures=["DeepseekV3ForCausalLMNextN"])), "NEXTN hands over the final state"),
    ("CK906", _set(architectures=["DeepseekV3ForCausalLMNextN"], num_nextn_predict_layers=0), "is 0 in"),
]


@pytest.mark.parametrize(
    ("code", "spoil", "words"), PLANTS, ids=[f"{n}-{code}" for n, (code, _, _) in enumerate(PLANTS)]
)
def test_a_planted_fault_is_named(
    code: str, spoil: Callable[[Pair], None], words: str, tmp_path: Path
) -> None:
    pair = Pair()
    spoil(pair)
    found = pair.check(tmp_path).problems
    mine = [problem for problem in found if problem.code == code]
    assert mine, f"found {[problem.code for problem in found]}"
    assert any(words in problem.text for problem in mine), [problem.text for problem in mine]
    for problem in found:
        assert problem.mend
        assert problem.text.isprintable()
        assert not problem.text.endswith(".")


def test_every_rule_is_planted() -> None:
    assert {code for code, _, _ in PLANTS} == {text.code for text in catalogue()}


@pytest.mark.parametrize("version", ["0.5.9", "0.5.15.post1", "0.5.23"])
def test_a_clean_pair_raises_nothing(version: str, tmp_path: Path) -> None:
    pair = Pair(version=version)
    _trained(2, 4, 6)(pair)
    report = pair.check(tmp_path)
    assert report.problems == []
    assert report.captured.depths == [2, 4, 6]


def test_the_mend_that_is_named_makes_the_pair_clean(tmp_path: Path) -> None:
    pair = Pair()
    pair.ids(-1, 3, 5)
    _trained(3, 5, 7)(pair)
    (problem,) = [p for p in pair.check(tmp_path / "a").problems if p.code == "CK801"]
    assert problem.change is not None
    pair.ids(*json.loads(problem.change.split("->")[1]))
    assert pair.check(tmp_path / "b").problems == []


def test_notes_and_warnings_come_after_errors(tmp_path: Path) -> None:
    pair = Pair(version="0.5.9")
    pair.ids(2, 4, 6)
    order = [problem.severity for problem in pair.check(tmp_path).problems]
    assert order == sorted(order, key=list(Severity).index)
    assert len(set(order)) == 2
