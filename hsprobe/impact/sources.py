"""Which tensors the draft is run on: what it was served, and what it was trained on."""

from __future__ import annotations

import json
from pathlib import Path

from hsprobe.compare.direct import Lane
from hsprobe.diagnose.evidence import Serving
from hsprobe.diagnose.naming import listed
from hsprobe.diagnose.sides import Side, chunk_lanes
from hsprobe.errors import HsprobeError
from hsprobe.formats.sglang_ids import depths_of
from hsprobe.impact.texts import Source


def served(infer: Side, *, received: bool) -> Source:
    """What the draft was served: what the target handed over, or with `received` what arrived.

    Raises:
        HsprobeError: neither was captured.
    """
    stack = infer.chunked("draft.input" if received else "aux")
    if stack is None:
        raise HsprobeError(
            f"{infer.trace.path} holds neither aux nor draft.input, so what the draft was given is unknown.",
            "Capture with '--sites aux,layer'.",
        )
    return Source(chunk_lanes(stack, infer.hidden), own=True)


def trained(train: Side, infer: Side, draft: Path) -> tuple[Source, list[str]]:
    """What the draft was trained on, and what is to be said of it.

    A dump has the chunks themselves. A reference of the whole model has every depth; the draft's own config
    then says which of them it was trained on.

    Raises:
        HsprobeError: neither tells.
    """
    stack = train.chunked()
    if stack is not None:
        return Source(chunk_lanes(stack, train.hidden)), []
    serving = Serving.of(infer.trace.provenance)
    layers = train.num_layers or infer.num_layers
    depths = None
    if layers is not None:
        depths = depths_of(serving.architecture, layer_ids(draft), layers, serving.version)
    missing = [d for d in depths or [] if d not in train.layers]
    if depths is None or missing:
        lacks = (
            f"depth {listed(missing)}" if missing else "a way to tell which depths the draft was trained on"
        )
        raise HsprobeError(
            f"{train.trace.path} holds no aux chunks and lacks {lacks}.",
            "Make it with 'hsprobe capture --model TARGET --layers IDS', the ids that were trained on.",
        )
    lanes: list[Lane] = [train.layers[d] for d in sorted(set(depths))]
    note = (
        f"TRAIN holds every depth; the draft is taken to be trained on depths {listed(sorted(set(depths)))}, "
        f"which {draft}/config.json asks for."
    )
    return Source(lanes), [note]


def layer_ids(draft: Path) -> list[int] | None:
    """`eagle_aux_hidden_state_layer_ids` of a draft's config, None where it has none."""
    try:
        config = json.loads((draft / "config.json").read_text(encoding="utf-8"))
        ids = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return ids if isinstance(ids, list) and ids and all(type(i) is int for i in ids) else None
