"""What SGLang will hand to the draft: from its config, the target's class and the version.

Sources: SGLang 0.5.9 and 0.5.15.post1 `model_executor/model_runner.py` (`ModelRunner.__init__`), 0.5.23
`model_executor/model_runner_components/spec_aux_hidden_state.py`; for DFlash `speculative/dflash_utils.py`
(`parse_dflash_draft_config`, `build_target_layer_ids`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hsprobe.check.config import Config, as_ids
from hsprobe.formats.sglang_ids import DFLASH, EAGLE3, depths_of, requested_depths, rule_of
from hsprobe.formats.sglang_models import ClassRule, by_class

KEY = "eagle_aux_hidden_state_layer_ids"
EAGLE_KEY = f"eagle_config.{KEY}"
DFLASH_KEY = "dflash_config.target_layer_ids"
FINAL_ALGORITHMS = ("EAGLE", "NEXTN", "FROZEN_KV_MTP")
_DFLASH_FAMILY = ("DFLASH", "DSPARK")
# Drafts with ids of layer outputs for a target read at layer inputs (`_map_muse_target_layer_ids`).
_MUSE_OUTPUTS = ("DFlash2DraftModel", "MuseGlimmerAssistantModel")


@dataclass(frozen=True)
class Captured:
    """What the draft will be handed.

    Attributes:
        algorithm: the speculative algorithm.
        ids: as read from the draft's config; None where it has none that can be used.
        key: where they were read, or why there are none.
        given: what stands under that key, whatever it is.
        requested: depths asked for, one an id, in the order of the ids; None where they are not known.
        depths: depths that the chunks carry, in the order of the concatenation; None where not known.
        final: the state after the final norm is handed over instead of chunks.
        rule: the target class's rule; None where the class is not known or cannot do it.
    """

    algorithm: str
    ids: list[int] | None
    key: str
    given: Any
    requested: list[int] | None
    depths: list[int] | None
    final: bool
    rule: ClassRule | None

    @property
    def lost(self) -> list[int]:
        """Depths asked for that never come."""
        return sorted(set(self.requested or []) - set(self.depths or [])) if self.depths is not None else []

    @property
    def family(self) -> str:
        """Whose setter of the target is called: "EAGLE3" or "DFLASH"."""
        return DFLASH if self.algorithm in _DFLASH_FAMILY else EAGLE3


def captured(target: Config, draft: Config, version: str, algorithm: str) -> Captured:
    """Work out what the draft will be handed."""
    if algorithm in FINAL_ALGORITHMS:
        return Captured(algorithm, None, "no ids: the final state", None, [], [], True, None)
    if algorithm in _DFLASH_FAMILY:
        ids, key, given = _dflash_ids(target, draft, algorithm)
    else:
        ids, key, given = _eagle_ids(draft)
        # Only a real false under the key that SGLang reads turns the chunks off.
        if draft.part("eagle_config").get("use_aux_hidden_state", True) in (False, None, 0):
            return Captured(algorithm, ids, key, given, [], [], True, None)
    found = Captured(algorithm, ids, key, given, None, None, False, None)
    found = replace(found, rule=rule_of(target.architecture, version, found.family))
    layers = target.num_layers
    unusable = ids is None and given is not None
    if layers is None or unusable or (ids is None and found.family == DFLASH):
        return found
    name = target.architecture
    known = name in by_class()
    # SGLang stops at start where a DFlash id is out of range.
    stops = found.family == DFLASH and any(not 0 <= i < layers for i in ids or [])
    if stops or (known and found.rule is None):
        return found
    read = [i + 1 for i in ids] if ids is not None and _muse_maps(target, draft, found.family) else ids
    return replace(
        found,
        requested=requested_depths(name, read, layers, version, found.family),
        depths=depths_of(name, read, layers, version, found.family),
    )


def _eagle_ids(draft: Config) -> tuple[list[int] | None, str, Any]:
    eagle = draft.part("eagle_config")
    if KEY not in eagle:
        return None, "none in eagle_config: the model's default", None
    given = eagle[KEY]
    if given is None:
        return None, f"{EAGLE_KEY} is null: the model's default", None
    return as_ids(given), EAGLE_KEY, given


def _dflash_ids(target: Config, draft: Config, algorithm: str) -> tuple[list[int] | None, str, Any]:
    nested = draft.part("dflash_config")
    places = [
        (DFLASH_KEY, nested.get("target_layer_ids")),
        ("target_layer_ids", draft.raw.get("target_layer_ids")),
    ]
    if algorithm == "DSPARK":
        places.insert(0, ("dspark_target_layer_ids", draft.raw.get("dspark_target_layer_ids")))
    for key, given in places:
        if given is not None:
            return as_ids(given), key, given
    layers, own = target.num_layers, draft.num_layers
    guess = dflash_default(layers, own) if layers and own else None
    return guess, f"none in {DFLASH_KEY}: guessed from the numbers of layers", None


def dflash_default(target_layers: int, draft_layers: int) -> list[int] | None:
    """The ids that SGLang takes where a DFlash draft names none; None where it raises instead."""
    if draft_layers == 1:
        return [target_layers // 2]
    span = target_layers - 4
    if span < 0 or draft_layers > 4096:
        return None
    return [round(1 + i * span / (draft_layers - 1)) for i in range(draft_layers)]


def _muse_maps(target: Config, draft: Config, family: str) -> bool:
    named = target.raw.get("model_type") == "muse_glimmer" and family == DFLASH
    return named and draft.architecture in _MUSE_OUTPUTS
