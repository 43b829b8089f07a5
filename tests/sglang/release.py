"""What the installed SGLang has, as tests ask it: facts, and marks that skip with the reason."""

from importlib.metadata import version

import pytest

from hsprobe.formats.sglang_ids import class_rule, depths_of
from hsprobe.formats.sglang_models import Rule
from hsprobe.probes.startup import installed

VERSION = version("sglang")
NEWER = bool(installed("kernels", "ops", "speculative", "gather_spec_extras.py"))
_BOUNDARIES = installed("srt", "layers", "layer_boundary", "stage.py")

OVERLAPS = NEWER
"""Whether scheduling can overlap with a draft on a CPU."""
FUSES = bool(_BOUNDARIES)
"""Whether sums over ranks can be fused on a CPU: the stand-in is for the kernel's new place."""
DEEPSEEK_IDS = (2, 3, 4)
DEPTHS = {"llama": [2, 4, 6], "deepseek": depths_of("DeepseekV3ForCausalLM", DEEPSEEK_IDS, 8, VERSION)}
"""What the ids that tests serve with stand for: (1, 3, 5) of a Llama, `DEEPSEEK_IDS`, of 8 layers each."""


def _needs(have: bool | None, lacks: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not have, reason=f"SGLang {VERSION} {lacks}")


plants_faults = _needs(_BOUNDARIES, "keeps no residual stream, out of which the fixtures plant faults")
is_newest = _needs(_BOUNDARIES, "is not the newest that is supported, out of which a future one is made")
counts_requests = _needs(
    installed("srt", "managers", "scheduler_components", "request_receiver.py"),
    "receives requests elsewhere than where the test counts collectives",
)
embeds_llama = _needs(_BOUNDARIES, "stops with a TypeError where a Llama is to hand over its embedding")
embeds_no_llama = _needs(not _BOUNDARIES, "lets a Llama hand over its embedding, which another test serves")
_BY_FIRST = class_rule("DeepseekV3ForCausalLM", VERSION).rule is Rule.FIRST_ID
reads_outputs = _needs(
    not _BY_FIRST, "reads a DeepSeek draft's ids as layer inputs, which another test is about"
)
looks_at_first_id = _needs(
    _BY_FIRST,
    "reads a DeepSeek draft's ids as layer outputs, whatever the first one is",
)
