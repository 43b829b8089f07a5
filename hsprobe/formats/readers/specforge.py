"""SpecForge's offline hidden states: one `.ckpt` or `.ckpt.gz` a sample, in groups of rows.

Source: SpecForge a6b6b023, scripts/prepare_hidden_states.py and specforge/algorithms/eagle3/providers.py.
Layer ids are not recorded; an id names the output of its layer. `hidden_state` is the final state after the
norm, `aux_hidden_state` the chunks (None or absent in old files without them). Token ids are not shifted.
Samples are padded on the right with id 0, and the padded rows are stored, without a mask that would tell.
DFlash's strategy writes `hidden_states` (chunks, no final state) instead.
"""

from __future__ import annotations

from typing import Any

from hsprobe.formats.dump import (
    Chunks,
    Final,
    Layout,
    Match,
    Numbering,
    Options,
    Reader,
    Rows,
    Sample,
    Sure,
    eagle3_depths,
    squeezed,
)
from hsprobe.formats.readers._samples import (
    FileSamples,
    first_sample,
    ids,
    mask,
    needed_sample,
    tensor,
    unpadded,
)
from hsprobe.formats.source import Source
from hsprobe.formats.stored import Stored

KEY = "specforge"
NAME = "SpecForge offline"
_SUFFIXES = (".ckpt", ".ckpt.gz")
_NUMBERING = Numbering("aux_hidden_state_layer_ids", 1)


def detect(source: Source) -> Match | None:
    """By the key names of the first sample, the batch axis, and the groups of rows."""
    found = first_sample(source, *_SUFFIXES)
    if found is None:
        return None
    name, content = found
    final, aux = content.get("hidden_state"), content.get("aux_hidden_state")
    grouped = name.startswith("rows_") or source.path.name.startswith("rows_")
    if isinstance(aux, Stored) and _batch_of_one(aux):
        return Match(2, "it has aux_hidden_state")
    if _batch_of_one(final) and "target" not in content and ("aux_hidden_state" in content or grouped):
        return Match(2, "its samples lie in groups of rows")
    if _batch_of_one(content.get("hidden_states")) and "loss_mask" in content:
        return Match(2, "it has hidden_states with a batch axis")
    return None


def _batch_of_one(found: object) -> bool:
    return isinstance(found, Stored) and found.ndim == 3 and found.shape[0] == 1


def open_dump(source: Source, options: Options) -> Reader:
    """See `Format`."""
    _, content = needed_sample(source, NAME, *_SUFFIXES)
    return FileSamples(source, _layout(content), _SUFFIXES, _sample)


def _layout(content: dict[str, Any]) -> Layout:
    final = content.get("hidden_state")
    aux = content.get("aux_hidden_state")
    chunks, hidden = None, final.shape[-1] if isinstance(final, Stored) else None
    if isinstance(aux, Stored):
        count = aux.shape[-1] // hidden if hidden else 3
        chunks = Chunks(count, _NUMBERING, default=eagle3_depths)
    elif isinstance(content.get("hidden_states"), Stored):
        # DFlash: neither the number of layers nor the width of one is stored.
        chunks = Chunks(0, _NUMBERING)
    return Layout(
        hidden=hidden,
        aux=chunks,
        final=Final("post", Sure.DEFAULT) if hidden else None,
        padding="a tail of token id 0 outside the loss mask is taken for padding",
    )


def _sample(name: str, content: dict[str, Any]) -> Sample:
    tokens, loss = ids(name, content), mask(content)
    rows = []
    for key, place in (("aux_hidden_state", "aux"), ("hidden_states", "aux"), ("hidden_state", "final")):
        # Old files name aux_hidden_state and hold None.
        if content.get(key) is not None:
            rows.append(Rows(place, (squeezed(tensor(name, content, key), 2),)))
    length = unpadded(tokens, loss)
    return Sample(
        name,
        tokens[:length],
        tuple(rows),
        padded=len(tokens) - length,
        loss_mask=None if loss is None else loss[:length],
    )
