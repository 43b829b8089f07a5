"""Bring together what chunks are settled with: streams, forms that fault classes propose, norms, weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hsprobe.compare.direct import Lane
from hsprobe.compare.noise import Level
from hsprobe.compare.stack import spread
from hsprobe.compare.statistics import Floats, finite_rows
from hsprobe.diagnose.account import Accountant
from hsprobe.diagnose.forms import gain, rms_normed
from hsprobe.diagnose.norms import Norms, is_final, stored_gains
from hsprobe.diagnose.registry import norm_codes, proposals
from hsprobe.diagnose.settle import LevelsOf, Settler, TrainedChunk, same_process_noise
from hsprobe.diagnose.sides import Side
from hsprobe.diagnose.stream import Stream, View
from hsprobe.diagnose.weights import WeightTest, mlp_test

_ROWS = 512
# The first layers are often dense where the others are mixtures of experts.
_LAYERS_TRIED, _ROWS_OF_WEIGHTS = 4, 64
_CAPTURED = "the final norm of the capture"


def settler(
    train: Side, infer: Side, lanes: Sequence[Lane], chosen: Sequence[TrainedChunk], levels: LevelsOf
) -> Settler:
    """What settles the chunks of a capture.

    Args:
        lanes: the served chunks. chosen: the training chunks.
        levels: (depth, stacks...) -> noise by phase of the first stack.
    """
    stack = lanes[0].stack
    top = infer.num_layers or train.num_layers

    def cross(states: Mapping[int, Lane], depth: int) -> float:
        named = depth if depth >= 0 else None
        return Level.widest(levels(named, stack, states[depth].stack).values()).expected

    own = Stream(_states(infer), infer.mids, same_process_noise(stack))
    theirs = _states(train)
    reference = Stream(theirs, train.mids, lambda depth: cross(theirs, depth))
    dumped = {
        c.depth if isinstance(c.depth, int) else -1 - j: c.lane
        for j, c in enumerate(chosen)
        if c.lane is not None and c.source != "asked for"
    }
    chunks = Stream(dumped, {}, lambda depth: cross(dumped, depth))
    norms = _norms(train, infer, top)
    traces = {"train": train.trace, "infer": infer.trace}
    return Settler(own, reference, chunks, levels, lambda s: Accountant(s, proposals(), norms, traces), top)


def _states(side: Side) -> dict[int, Lane]:
    return {depth: lane for depth, lane in side.layers.items() if isinstance(depth, int)}


def _norms(train: Side, infer: Side, top: int | None) -> Norms:
    gains: dict[str, Floats] = {}
    for side in (infer, train):
        gains = gains or stored_gains(_folder(side), side.hidden)
    final = {name for name in gains if is_final(name)}
    for side in (infer, train):
        measured = _measured(side, top)
        if measured is not None and not final:
            gains = {**gains, _CAPTURED: measured}
            final = {_CAPTURED}
    return Norms(gains, frozenset(final), top, norm_codes())


def _measured(side: Side, top: int | None) -> Floats | None:
    """The final norm's gain, from what goes into it and what comes out. -> [H]"""
    layers = side.layers
    if top is None or top not in layers or "final" not in layers:
        return None
    after = layers["final"]
    rows = spread(after.stack.keys.usable, after.stack.keys, _ROWS)
    before = View(after.stack, rows).read(layers[top])
    if not np.isfinite(before[:, 0]).any():
        return None
    return gain(after.of(after.stack.read(rows)), rms_normed(before))


def served_weights(train: Side, infer: Side) -> WeightTest | None:
    """Whether the server's MLPs compute with the weights that the training side names; None if untold.

    The first layer with a plain MLP is tried, from the server's stream before and after it.
    """
    states, mids = _states(infer), infer.mids
    folders = [_folder(train), _folder(infer)]
    for layer in sorted(mids)[:_LAYERS_TRIED]:
        if layer + 1 not in states:
            continue
        middle = mids[layer]
        rows = spread(middle.stack.keys.usable, middle.stack.keys, _ROWS_OF_WEIGHTS)
        before = middle.of(middle.stack.read(rows))
        after = View(middle.stack, rows).read(states[layer + 1])
        whole = finite_rows(before) & finite_rows(after)
        noise = same_process_noise(middle.stack)(layer)
        for folder in folders:
            found = mlp_test(folder, layer, before[whole], after[whole], noise)
            if found is not None:
                return found
    return None


def _folder(side: Side) -> object:
    model = side.trace.provenance.get("model")
    return model.get("path") if isinstance(model, dict) else None
