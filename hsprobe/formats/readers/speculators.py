"""speculators since 0.5: `hs_<i>.safetensors` beside an arrow data set, or as vLLM's connector leaves them.

Source: speculators 0.9.0, cli/generate_offline_data.py and train/data.py; hs-connectors 0.9.0; vLLM's
example_hidden_states_connector.py. `hidden_states` is [S, K + 1, H]: the chunks in ascending order, then, as
launched by default, the last layer's output before the final norm. Ids are vLLM's: id n is the stream after n
layers. Nothing is shifted or padded; ids of layers are not stored. With the FP8 connector the values are
float8 and `hidden_states_scales` holds one factor a row. With vLLM's prefix cache on, the rows of cached
blocks are missing in front. The loss mask lies in the data set alone, whose row i has the token ids of
`hs_<i>`; speculators refuses a sample whose own ids differ from them.

Letters: S tokens, K chunks, H hidden width.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from hsprobe.errors import HsprobeError
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
from hsprobe.formats.readers._arrow import DataSet, data_set
from hsprobe.formats.readers._columns import columns, scaled
from hsprobe.formats.readers._samples import FileSamples, first_samples, ids, tensor
from hsprobe.formats.source import Source
from hsprobe.formats.stored import Ints, Stored, damaged

KEY = "speculators"
NAME = "speculators 0.5 or later"
_SUFFIXES = (".safetensors",)
_SCALES = "hidden_states_scales"
_BLOCK = 16
"""vLLM's default size of a block of the KV cache, in tokens."""
_ROW = re.compile(r"(?:.*/)?hs_(\d{1,12})\.safetensors")


def detect(source: Source) -> Match | None:
    """By token_ids beside hidden_states with the layers on the middle axis."""
    found = _first(source)
    return Match(2, "it has token_ids beside hidden_states of three axes") if found else None


def open_dump(source: Source, options: Options) -> Reader:
    """See `Format`."""
    found = _first(source)
    if found is None:
        raise HsprobeError(
            f"{source.path} holds no sample of speculators that can be read.",
            "Give the folder with its .safetensors files.",
        )
    states = found[1]["hidden_states"]
    slots, hidden = states.shape[1:]
    rows, note = data_set(source)
    notes = [note] if note else []
    if _SCALES in found[1]:
        notes.append("the values are float8 with a scale for each row, about 3 % coarse")
    layout = Layout(
        hidden=hidden,
        aux=Chunks(slots - 1, Numbering("--target-layer-ids", 0), default=eagle3_depths)
        if slots > 1
        else None,
        final=Final("pre", Sure.DEFAULT),
        notes=tuple(notes),
    )
    return FileSamples(source, layout, _SUFFIXES, lambda name, content: _sample(name, content, rows))


def _first(source: Source) -> tuple[str, dict[str, Any]] | None:
    for name, content in first_samples(source, *_SUFFIXES):
        states = content.get("hidden_states")
        if (
            isinstance(states, Stored)
            and states.ndim == 3
            and 0 not in states.shape[1:]
            and "token_ids" in content
        ):
            return name, content
    return None


def _sample(name: str, content: dict[str, Any], data: DataSet | None) -> Sample:
    tokens = ids(name, content, "token_ids")
    states = tensor(name, content, "hidden_states", 3)
    n, slots, hidden = states.shape
    if not slots or not hidden:
        raise damaged(name, "its hidden_states are empty")
    flat = states.reshape((n, slots * hidden))
    if isinstance(content.get(_SCALES), Stored):
        flat = scaled(flat, content[_SCALES])
    # vLLM's prefix cache spares whole blocks of rows in front; the connector stores what was computed.
    spared = len(tokens) - n
    start = spared if spared > 0 and spared % _BLOCK == 0 else 0
    rows = [Rows("final", (columns(flat, (slots - 1) * hidden, slots * hidden),), start)]
    if slots > 1:
        rows.append(Rows("aux", (columns(flat, 0, (slots - 1) * hidden),), start))
    return Sample(name, tokens, tuple(rows), loss_mask=_mask(name, tokens, data))


def _mask(name: str, tokens: Ints, data: DataSet | None) -> Ints | None:
    """The loss mask of the sample's row in the data set.

    Raises:
        HsprobeError: the row has other token ids.
    """
    found = _ROW.fullmatch(name)
    if data is None or found is None:
        return None
    row = data.row(int(found[1]))
    if row is None:
        return None
    if not np.array_equal(row.get("input_ids", tokens), tokens):
        raise damaged(name, f"its token ids are not those of row {found[1]} of the data set")
    return row.get("loss_mask")
