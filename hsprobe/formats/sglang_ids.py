"""SGLang's aux layer ids as depths, and back: the rules of its model classes, as data.

SGLang captures the *input* of decoder layer k, which is the residual stream at depth k. Which k an id
in `eagle_aux_hidden_state_layer_ids` asks for depends on the model class and the version. Whatever the
order of the ids, the chunks come out in ascending depth, and an id given twice yields one chunk.
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hsprobe.formats.sglang_models import EMBEDS_SINCE, Beyond, ClassRule, Rule, Version, by_class

__all__ = ["Beyond", "ClassRule", "Reach", "Rule", "class_rule", "depths_of", "ids_for", "rule_of"]

EAGLE3 = "EAGLE3"
DFLASH = "DFLASH"


@dataclass(frozen=True)
class Reach:
    """Ids that make a model hand over the wanted depths, or why there are none."""

    ids: list[int] | None
    reason: str


def rule_of(architecture: str, version: str | None, algorithm: str = EAGLE3) -> ClassRule | None:
    """The rule of a model class; None where SGLang of that version has none for it, or the class is unknown.

    Args:
        version: as SGLang writes it; one that cannot be read is taken as the newest known.
        algorithm: whose ids, "EAGLE3" or "DFLASH".
    """
    row = by_class().get(architecture)
    if row is None:
        return None
    number = parse_version(version)
    history = row.dflash if algorithm == DFLASH else row.eagle3
    return next((r for r in reversed(history) if number is None or r.since <= number), None)


def class_rule(architecture: str, version: str | None, algorithm: str = EAGLE3) -> ClassRule:
    """As `rule_of`, with the rule of most classes where there is none."""
    return rule_of(architecture, version, algorithm) or ClassRule(Rule.OUTPUT)


def stops_at_embedding(architecture: str, version: str | None) -> bool:
    """Whether this version ends with a TypeError where the model is to hand over its embedding output."""
    row, number = by_class().get(architecture), parse_version(version)
    since = None if row is None else EMBEDS_SINCE.get(row.file)
    return since is not None and number is not None and number < since


def parse_version(version: str | None) -> Version | None:
    """`0.5.13.post1` -> (0, 5, 13, 1); None when there is no number to read."""
    match = re.match(r"v?(\d+(?:\.\d+)*)(?:\.?post(\d+))?", version or "")
    if match is None:
        return None
    release = tuple(int(part) for part in match[1].split("."))
    # Pad, so that the number of a post release never lands in the place of a patch number.
    release += (0,) * (3 - len(release))
    return (*release, int(match[2])) if match[2] else release


def requested_depths(
    architecture: str,
    ids: Sequence[int] | None,
    num_layers: int,
    version: str | None = None,
    algorithm: str = EAGLE3,
) -> list[int]:
    """The depths asked for, one an id and in the order of the ids, whether or not they can be captured.

    Args:
        ids: as written in the draft's config; None for the model's default.
    """
    entry = class_rule(architecture, version, algorithm)
    if ids is None:
        defaults = [2, num_layers // 2, num_layers - 3]
        return [d + 1 for d in defaults] if entry.default_plus_one else defaults
    if entry.rule is Rule.INPUT or (entry.rule is Rule.FIRST_ID and (not ids or ids[0] != 1)):
        return list(ids)
    if entry.rule is Rule.LAST_BOUNDARY and ids and max(ids) == num_layers:
        return list(ids)
    return [i + 1 for i in ids]


def depths_of(
    architecture: str,
    ids: Sequence[int] | None,
    num_layers: int,
    version: str | None = None,
    algorithm: str = EAGLE3,
) -> list[int]:
    """The depths that the chunks carry: ascending, once each, without those the model never reaches."""
    entry = class_rule(architecture, version, algorithm)
    if not entry.captures:
        return []
    top = num_layers if entry.captures_last else num_layers - 1
    asked = requested_depths(architecture, ids, num_layers, version, algorithm)
    return sorted({d for d in asked if 0 <= d <= top})


def ids_for(
    architecture: str,
    depths: Sequence[int],
    num_layers: int,
    version: str | None = None,
    algorithm: str = EAGLE3,
) -> Reach:
    """Ids that make the model capture `depths`, found by trying; `ids` is None when nothing reaches them."""
    wanted = sorted(set(depths))
    entry = class_rule(architecture, version, algorithm)
    if not wanted:
        return Reach(None, "no depths are wanted")
    if wanted[0] < 0 or wanted[-1] > num_layers:
        return Reach(None, f"the model has {num_layers} layers, so depths end at {num_layers}")
    for ids in _candidates(wanted):
        if depths_of(architecture, ids, num_layers, version, algorithm) == wanted:
            return Reach(ids, entry.rule.value)
    if wanted[-1] == num_layers and not entry.captures_last:
        name = architecture or "this model"
        return Reach(
            None, f"SGLang never captures the output of the last layer (depth {num_layers}) in {name}"
        )
    return Reach(None, f"the rule of {architecture} cannot express these depths ({entry.rule.value})")


def _candidates(wanted: Sequence[int]) -> Iterator[list[int]]:
    """Ids worth trying: as outputs, as inputs, then either with another id in front (first-id rule)."""
    outputs = [d - 1 for d in wanted]
    inputs = list(wanted)
    yield outputs
    yield inputs
    for ids, lead in itertools.product((outputs, inputs), range(1, len(wanted))):
        yield [ids[lead], *ids[:lead], *ids[lead + 1 :]]
