"""BaldEagle's training data: `<group>/data_<i>.ckpt`, three states stacked on an axis of their own.

Source: NickL77/BaldEagle 649195f9, generate_data/generate_data_fused_features.py and generate_data.py.
`hidden_state` is [3, S, H]: transformers' hidden_states at 2, L/2 and L-3, so an id is a depth, and there
is no last state. The plain variant stores [1, S, H], the last state after the final norm. Neither shifted
nor padded.
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
)
from hsprobe.formats.readers._samples import FileSamples, ids, mask, needed_sample, tensor, typical_sample
from hsprobe.formats.source import Source
from hsprobe.formats.stored import Stored

KEY = "baldeagle"
NAME = "BaldEagle"
_SUFFIXES = (".ckpt",)


def detect(source: Source) -> Match | None:
    """By a `hidden_state` with an axis for the layers, or of one layer outside SpecForge's groups of rows."""
    content = typical_sample(source, *_SUFFIXES)
    state = content.get("hidden_state")
    if (
        not isinstance(state, Stored)
        or state.ndim != 3
        or "target" in content
        or "aux_hidden_state" in content
    ):
        return None
    if state.shape[0] > 1:
        return Match(2, "its hidden_state has an axis for the layers")
    first = source.peek(*_SUFFIXES, count=1)[0]
    grouped = first.startswith("rows_") or source.path.name.startswith("rows_")
    return None if grouped else Match(2, "its hidden_state has a batch axis and stands alone")


def open_dump(source: Source, options: Options) -> Reader:
    """See `Format`."""
    state = tensor(*needed_sample(source, NAME, *_SUFFIXES), "hidden_state", 3)
    if state.shape[0] > 1:
        aux = Chunks(state.shape[0], Numbering("hidden_states index", 0), default=eagle3_depths)
        layout = Layout(hidden=state.shape[2], aux=aux)
    else:
        layout = Layout(hidden=state.shape[2], final=Final("post", Sure.DEFAULT))
    return FileSamples(source, layout, _SUFFIXES, _sample)


def _sample(name: str, content: dict[str, Any]) -> Sample:
    state = tensor(name, content, "hidden_state", 3)
    place = "aux" if state.shape[0] > 1 else "final"
    rows = Rows(place, tuple(state.at(k) for k in range(min(state.shape[0], 64))))
    return Sample(name, ids(name, content), (rows,), loss_mask=mask(content))
