"""What differing values come from: the one class that the evidence bears out, or none."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from hsprobe.diagnose.evidence import Evidence
from hsprobe.diagnose.model import Depth, LayerLine
from hsprobe.diagnose.values import Difference
from hsprobe.diagnose.weights import Match

PLACEHOLDER, PRECISION, STALE, DIVERGENCE, RANKS, UNKNOWN = (
    "placeholder",
    "precision",
    "stale",
    "divergence",
    "ranks",
    "unknown",
)
# Values of no more mantissa bits than this were rounded to 8 bits or fewer.
COARSE_BITS = 4
# An error of this size is another model's state; no rounding of weights goes so far.
_NOT_ROUNDING = 0.95


def kind(evidence: Evidence) -> str:
    """One of the names above; empty where no values differ."""
    found = evidence.differences
    layers = broken(evidence)
    if ranks_part_before(evidence, [*(one.depth for one in found), *(line.depth for line in layers[:1])]):
        return RANKS
    if not found:
        return _by_layers(evidence, layers) if layers else ""
    if all(one.placeholder is not None for one in found):
        return PLACEHOLDER
    if any(one.handed for one in found):
        return UNKNOWN
    if layers and _by_layers(evidence, layers) == DIVERGENCE:
        return DIVERGENCE
    if not all(one.everywhere for one in found):
        return UNKNOWN
    if coarse(evidence) or evidence.serving.quantized:
        return PRECISION
    test = evidence.weights
    if test is not None:
        return STALE if test.match is Match.OTHER else PRECISION
    if min(one.error for one in found) > _NOT_ROUNDING or _embedding_differs(evidence):
        return STALE
    return PRECISION if all(one.isotropic for one in found) and grows(found) else UNKNOWN


def ranks_part_before(evidence: Evidence, depths: Iterable[Depth]) -> bool:
    """Whether the streams of the server's ranks are not the same at any of these depths."""
    known = [depth for depth in depths if depth is not None]
    places = [facts.broken_from for facts in evidence.ranks if facts.broken_from is not None]
    return bool(known and places) and all(d == "final" or 2 * int(d) >= min(places) for d in known)


def broken(evidence: Evidence) -> list[LayerLine]:
    """Depths at which the two sides' streams differ."""
    return [line for line in evidence.layers if not line.ok and line.rows > line.nonfinite]


def coarse(evidence: Evidence) -> list[tuple[str, Difference]]:
    """("served" or "trained", difference) where one side's values are of few bits and the other's are not."""
    found = []
    for one in evidence.differences:
        served, trained = one.shape.bits
        if min(served, trained) <= COARSE_BITS < max(served, trained):
            found.append(("served" if served < trained else "trained", one))
    return found


def grows(found: list[Difference]) -> bool:
    """Whether the error does not fall with depth by more than noise of its own would."""
    errors = [one.error for one in sorted(found, key=lambda one: one.depth)]
    return all(later > 0.5 * earlier for earlier, later in pairwise(errors))


def _by_layers(evidence: Evidence, layers: list[LayerLine]) -> str:
    """Whether the streams agree at first, which precision and other weights do not let them."""
    first = layers[0]
    before = [line for line in evidence.layers[: evidence.layers.index(first)] if line.ok]
    computed = [line for line in before if isinstance(line.depth, int) and line.depth > 0]
    if computed:
        return DIVERGENCE
    if first.depth == 0:
        return STALE
    test = evidence.weights
    if test is not None:
        return STALE if test.match is Match.OTHER else PRECISION
    errors = [line.error for line in layers]
    smooth = all(later > 0.5 * earlier for earlier, later in pairwise(errors))
    return PRECISION if smooth and len(errors) > 1 else DIVERGENCE


def _embedding_differs(evidence: Evidence) -> bool:
    return any(line.depth == 0 and not line.ok for line in evidence.layers)
