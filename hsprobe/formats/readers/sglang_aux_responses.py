"""Answers of SGLang's `/generate` with aux hidden states (`--enable-return-aux-hidden-states`), kept as JSON.

See `_responses` for their form. The chunks ascend, whatever the order of
`--return-aux-hidden-state-layer-ids`, whose ids name outputs of layers (in nearly all model classes, see
`sglang_ids`). The final state is not among them, and nothing tells that these are no final states.
"""

from __future__ import annotations

from hsprobe.errors import HsprobeError
from hsprobe.formats.dump import Chunks, Layout, Match, Numbering, Options, Reader, eagle3_depths
from hsprobe.formats.readers import _responses
from hsprobe.formats.source import Source

KEY = "sglang-aux-responses"
NAME = "SGLang answers with aux hidden states"


def detect(source: Source) -> Match | None:
    """By meta_info.hidden_states. That it is not final states cannot be told."""
    return Match(2, "meta_info has hidden_states") if _responses.found_in(source) else None


def open_dump(source: Source, options: Options) -> Reader:
    """See `Format`."""
    if _responses.first(source) is None:
        raise HsprobeError(
            f"{source.path} holds no answer of SGLang with hidden states.",
            "Ask for them with return_hidden_states, from a server with --enable-return-aux-hidden-states.",
        )
    # The width of one chunk is not stored; the capture tells it.
    numbering = Numbering("--return-aux-hidden-state-layer-ids", 1)
    layout = Layout(aux=Chunks(0, numbering, default=eagle3_depths))
    return _responses.Answers(source, layout, "aux")
