"""What SpecForge's patched server stores: `<sample>.g<generation>.ckpt` in a shared folder.

Source: SpecForge a6b6b023, specforge/inference/adapters/server_capture.py and
specforge/runtime/data_plane/disaggregated.py. The word `hidden_state` changes its meaning: here it is the aux
chunks, and `target` is the final state after the norm. Neither shifted nor padded. Layer ids travel in the
server's response, not in the file.
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
from hsprobe.formats.readers._samples import FileSamples, ids, mask, needed_sample, tensor, typical_sample
from hsprobe.formats.source import Source
from hsprobe.formats.stored import Stored, damaged

KEY = "specforge-server"
NAME = "SpecForge server capture"
_SUFFIXES = (".ckpt",)


def detect(source: Source) -> Match | None:
    """By `target` beside `hidden_state`, both with a batch axis."""
    content = typical_sample(source, *_SUFFIXES)
    aux, final = content.get("hidden_state"), content.get("target")
    if isinstance(aux, Stored) and isinstance(final, Stored) and aux.ndim == final.ndim == 3:
        return Match(2, "it has target beside hidden_state")
    return None


def open_dump(source: Source, options: Options) -> Reader:
    """See `Format`."""
    found = needed_sample(source, NAME, *_SUFFIXES)
    hidden = tensor(*found, "target").shape[-1]
    if not hidden:
        raise damaged(found[0], "its target is empty")
    layout = Layout(
        hidden=hidden,
        aux=Chunks(
            tensor(*found, "hidden_state").shape[-1] // hidden,
            Numbering("aux_hidden_state_layer_ids", 1),
            default=eagle3_depths,
        ),
        final=Final("post", Sure.DEFAULT),
    )
    return FileSamples(source, layout, _SUFFIXES, _sample)


def _sample(name: str, content: dict[str, Any]) -> Sample:
    return Sample(
        name,
        ids(name, content),
        (
            Rows("aux", (squeezed(tensor(name, content, "hidden_state"), 2),)),
            Rows("final", (squeezed(tensor(name, content, "target"), 2),)),
        ),
        loss_mask=mask(content),
    )
