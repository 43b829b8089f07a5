"""hsprobe's own draft computes what the fixtures' draft, written apart from it, was trained to compute."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hsprobe.draft.config import Rope, read_config
from hsprobe.draft.reference import load
from hsprobe.draft.rope import frequencies
from hsprobe.errors import HsprobeError
from hsprobe.fixtures import models
from hsprobe.fixtures.draft import DraftShape, Eagle3Draft

TRAINED = Path(models.__file__).parent / "trained"
ROWS, STEPS = 24, 3


@pytest.fixture(scope="module")
def trained():
    return load(TRAINED / "target", TRAINED / "draft")


@pytest.fixture(scope="module")
def rows():
    generator = torch.Generator().manual_seed(0)
    tokens_T = torch.randint(0, 256, (ROWS,), generator=generator)
    return torch.randn(ROWS, 3 * 128, generator=generator), tokens_T


def fixture_draft() -> Eagle3Draft:
    draft = Eagle3Draft(DraftShape())
    state = load_file(TRAINED / "draft" / "model.safetensors")
    draft.load_state_dict({name: t.float() if t.is_floating_point() else t for name, t in state.items()})
    return draft.eval()


@torch.no_grad()
def test_unrolled_steps_equal_those_of_the_fixture(trained, rows):
    hidden_TA, tokens_T = rows
    ours = trained.unroll(hidden_TA, tokens_T, STEPS)
    theirs = fixture_draft().unroll(hidden_TA[None], trained.embed(tokens_T)[None], STEPS)
    for step in range(STEPS):
        torch.testing.assert_close(
            trained.logits(ours[step])[step:], theirs[step][0, step:], rtol=1e-4, atol=1e-4
        )


@torch.no_grad()
def test_one_row_at_a_time_equals_all_at_once(trained, rows):
    hidden_TA, tokens_T = rows
    whole = trained.forward(hidden_TA, tokens_T)
    first = trained.forward(hidden_TA[:10], tokens_T[:10])
    rest = trained.forward(hidden_TA[10:], tokens_T[10:], cache=first.cache)
    torch.testing.assert_close(
        torch.cat((first.final_TH, rest.final_TH)), whole.final_TH, rtol=1e-4, atol=1e-5
    )
    assert len(first.cache) == 10
    assert len(rest.cache) == ROWS


@torch.no_grad()
def test_a_chain_feeds_its_own_state_and_token(trained, rows):
    hidden_TA, tokens_T = rows
    after = trained.forward(hidden_TA, tokens_T)
    chain = trained.draft_chain(after, STEPS)
    fed = torch.cat((tokens_T, torch.tensor(chain[:-1])))
    padded_TA = torch.cat((hidden_TA, torch.zeros(STEPS - 1, hidden_TA.shape[1])))
    finals = trained.unroll(padded_TA, fed, STEPS)
    assert chain == [int(trained.best_tokens(finals[step][ROWS - 1 + step][None])) for step in range(STEPS)]


@torch.no_grad()
def test_a_window_hides_what_lies_before_it(trained, rows):
    from dataclasses import replace

    hidden_TA, tokens_T = rows
    narrow = replace(trained, window=4)
    other_TA = hidden_TA.clone()
    other_TA[:10] += 1
    seen, unseen = narrow.forward(hidden_TA, tokens_T), narrow.forward(other_TA, tokens_T)
    torch.testing.assert_close(seen.final_TH[14:], unseen.final_TH[14:])
    assert not torch.allclose(seen.final_TH[13], unseen.final_TH[13])
    assert not torch.allclose(trained.forward(hidden_TA, tokens_T).final_TH[20], seen.final_TH[20])


def edited(path: Path, **keys: object) -> Path:
    shutil.copytree(TRAINED / "draft", path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **keys}))
    return path


def stored(path: Path, **tensors: torch.Tensor) -> Path:
    state = load_file(path / "model.safetensors")
    save_file({**state, **tensors}, path / "model.safetensors", metadata={"format": "pt"})
    return path


@torch.no_grad()
def test_norms_before_fc_are_applied_where_the_checkpoint_holds_them(tmp_path, trained, rows):
    hidden_TA, _ = rows
    gain_A, gain_H = torch.rand(3 * 128) + 0.5, torch.rand(128) + 0.5
    # The flags may be lost: what the checkpoint holds, it was trained with.
    over_all = stored(edited(tmp_path / "a"), **{"input_norm.weight": gain_A})
    each = stored(
        edited(tmp_path / "b"),
        **{f"aux_norm_{k}.weight": gain_H.clone() for k in ("low", "mid", "high")},
    )
    unit_TA = torch.nn.functional.rms_norm(hidden_TA, (3 * 128,), gain_A, eps=1e-5)
    fused = load(TRAINED / "target", over_all).fuse(hidden_TA)
    torch.testing.assert_close(fused, unit_TA @ trained.weight("fc.weight").T, rtol=1e-4, atol=1e-5)
    unit = torch.nn.functional.rms_norm(hidden_TA.reshape(-1, 3, 128), (128,), gain_H, eps=1e-5)
    fused = load(TRAINED / "target", each).fuse(hidden_TA)
    torch.testing.assert_close(fused, unit.flatten(1) @ trained.weight("fc.weight").T, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_output_norm_chooses_what_is_recycled(tmp_path, rows):
    hidden_TA, tokens_T = rows
    plain = load(TRAINED / "target", TRAINED / "draft").forward(hidden_TA, tokens_T)
    normed = load(TRAINED / "target", edited(tmp_path / "d", norm_output=True)).forward(hidden_TA, tokens_T)
    assert torch.equal(plain.recycled_TH, plain.layer_TH)
    assert torch.equal(normed.recycled_TH, normed.final_TH)


def test_offsets_become_target_ids(tmp_path):
    models.write_llama(tmp_path / "target")
    draft = models.write_eagle3_draft(tmp_path / "draft", tmp_path / "target", draft_tokens=[3, 9, 200])
    assert load(tmp_path / "target", draft).token_of.tolist() == [3, 9, 200]


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 512},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
        {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 512, "mscale": 0.7,
         "mscale_all_dim": 0.5, "beta_fast": 16, "beta_slow": 2},
    ],
    ids=lambda scaling: f"{scaling['rope_type']}-{len(scaling)}",
)  # fmt: skip
def test_scaled_frequencies_equal_those_of_transformers(scaling):
    config = LlamaConfig(
        head_dim=64, rope_parameters={**scaling, "rope_theta": 5e5}, max_position_embeddings=2048
    )
    theirs, magnitude = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    ours, factor = frequencies(Rope(base=5e5, dims=64, limit=2048, scaling=scaling))
    torch.testing.assert_close(ours.float(), theirs, rtol=1e-6, atol=0)
    assert factor == pytest.approx(magnitude)


def test_old_and_new_ways_of_writing_rope_are_read(tmp_path):
    old = read_config(edited(tmp_path / "a", rope_theta=7.0, rope_scaling={"type": "linear", "factor": 2}))
    new = read_config(
        edited(tmp_path / "b", rope_parameters={"rope_type": "linear", "factor": 2, "rope_theta": 7.0})
    )
    assert (old.rope.base, old.rope.kind) == (new.rope.base, new.rope.kind) == (7.0, "linear")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"hidden_size": 64}, "shape"),
        ({"num_attention_heads": 3}, "do not fit"),
        ({"architectures": ["LlamaForCausalLM"]}, "not a LlamaForCausalLMEagle3"),
        ({"hidden_act": "gelu"}, "not silu"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "not known"),
    ],
)
def test_what_does_not_fit_is_said(tmp_path, keys, words):
    with pytest.raises(HsprobeError, match=words):
        load(TRAINED / "target", edited(tmp_path / "d", **keys)).rotation  # noqa: B018


def test_a_pickled_program_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return (print, ("unpickled",))

    folder = edited(tmp_path / "d")
    (folder / "model.safetensors").unlink()
    torch.save({"fc.weight": Evil()}, folder / "pytorch_model.bin")
    with pytest.raises(HsprobeError, match=r"refused|cannot be read"):
        load(TRAINED / "target", folder)
