"""Whatever the files hold, a check ends in a report or in one sentence."""

import json
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hsprobe.check.run import check
from hsprobe.errors import HsprobeError
from hsprobe.report import checked
from tests.check.models import DRAFT, TARGET, draft_tensors, write_model, write_safetensors

_KEYS = sorted(
    {
        *TARGET,
        *DRAFT,
        "text_config",
        "dflash_config",
        "rope_scaling",
        "rope_parameters",
        "quantization_config",
    }
    | {"target_hidden_size", "num_aux_hidden_states", "fc_norm", "norm_output", "target_layer_ids", "bias"}
    | {"eagle_aux_hidden_state_layer_ids", "sliding_window", "num_nextn_predict_layers", "head_dim"}
)
_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from(
        ["LlamaForCausalLMEagle3", "DFlashDraftModel", "GptOssForCausalLM", "DeepseekV3ForCausalLM"]
    ),
)
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from(_KEYS) | st.text(max_size=6), inner, max_size=4),
    ),
    max_leaves=8,
)
_CHANGES = st.dictionaries(st.sampled_from(_KEYS), _VALUES, max_size=4)
_SETTINGS = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def _ends_well(folder: Path, version: str, algorithm: str | None) -> None:
    try:
        report = check(folder / "target", folder / "draft", version=version, algorithm=algorithm)
    except HsprobeError:
        return
    for form in checked.FORMATS:
        with (folder / "out").open("w") as stream:
            checked.write(report, form, stream)
    for problem in report.problems:
        assert len(problem.text) < 2000


@_SETTINGS
@given(
    target=_CHANGES,
    draft=_CHANGES,
    version=st.sampled_from(["0.5.9", "0.5.15.post1", "0.5.23", "0.4.0", "9.9"]),
    algorithm=st.sampled_from([None, "EAGLE", "EAGLE3", "NEXTN", "DFLASH", "DSPARK"]),
)
def test_any_config_ends_in_a_report_or_a_sentence(
    target: dict[str, Any], draft: dict[str, Any], version: str, algorithm: str | None, tmp_path: Path
) -> None:
    write_model(tmp_path / "target", {**TARGET, **target})
    write_model(tmp_path / "draft", {**DRAFT, **draft})
    if not (tmp_path / "draft" / "model.safetensors").exists():
        write_safetensors(tmp_path / "draft" / "model.safetensors", draft_tensors())
    _ends_well(tmp_path, version, algorithm)


@_SETTINGS
@given(data=st.data())
def test_any_weights_end_in_a_report_or_a_sentence(data: st.DataObject, tmp_path: Path) -> None:
    write_model(tmp_path / "target", TARGET)
    write_model(tmp_path / "draft", DRAFT, draft_tensors())
    path = tmp_path / "draft" / "model.safetensors"
    raw = bytearray(path.read_bytes()[:6000])
    if data.draw(st.booleans()):
        entry = st.fixed_dictionaries(
            {"dtype": st.sampled_from(["BF16", "I64", "BOOL", "F4", "X"]) | st.text(max_size=3)},
            optional={
                "shape": st.lists(st.integers(-2, 1 << 50), max_size=4) | _VALUES,
                "data_offsets": st.lists(st.integers(0, 300), min_size=2, max_size=2) | _VALUES,
            },
        )
        names = st.sampled_from(sorted(draft_tensors())) | st.text(max_size=8)
        header = json.dumps(data.draw(st.dictionaries(names, entry | _VALUES, max_size=5))).encode()
        raw = bytearray(len(header).to_bytes(8, "little") + header + bytes(300))
    for _ in range(data.draw(st.integers(0, 6))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
    _ends_well(tmp_path, "0.5.23", None)
