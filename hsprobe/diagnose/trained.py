"""The training chunks, and what is known of their depths."""

from __future__ import annotations

from dataclasses import dataclass

from hsprobe.compare.direct import Lane
from hsprobe.diagnose.chunkline import label_depth
from hsprobe.diagnose.identify import Identity, Label
from hsprobe.diagnose.model import Depth


@dataclass
class Trained:
    """A training chunk, or in a whole-model reference the depth the server was asked for.

    Attributes:
        depth: what it is; `source` how that is known; `declared` what the dump says.
        margin: how many times worse the second best depth fits, where it was looked for.
    """

    lane: Lane | None
    depth: Depth
    source: str
    declared: Depth
    margin: float | None = None

    def label(self, index: int) -> Label:
        return Label.of(self.depth, index)


def found_depth(whole: Identity, chosen: list[Trained]) -> Depth:
    """The depth of a served chunk, as far as it was identified."""
    if not whole.clear or whole.best is None:
        return None
    if whole.best.kind == "chunk":
        return chosen[whole.best.number].depth if 0 <= whole.best.number < len(chosen) else None
    return label_depth(whole.best)


def put_in_order(chosen: list[Trained], found: list[Identity]) -> bool:
    """Correct the depths that a dump declares where they contradict SGLang's ascending order.

    SGLang hands chunks over in ascending depth. Where the served chunks, named by the depths which the dump
    declares for its own, would not ascend, it is the dump that names its chunks wrongly. Returns whether
    anything was changed.
    """
    depths = [whole.best.depth for whole in found if whole.clear and whole.best is not None]
    known = [depth for depth in depths if depth is not None]
    if len(known) != len(found) or len(set(known)) != len(known) or known == sorted(known):
        return False
    if any(trained.source != "declared" for trained in chosen):
        return False
    right = dict(zip(known, sorted(known), strict=True))
    for trained in chosen:
        if isinstance(trained.depth, int) and right.get(trained.depth, trained.depth) != trained.depth:
            trained.depth, trained.source = right[trained.depth], "identified"
    return True
