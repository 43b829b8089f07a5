"""Answers of SGLang's `/generate` with final hidden states (`return_hidden_states`), kept as JSON.

See `_responses` for their form. The states are from after the final norm; a few models (Step-3.5, DeepSeek V4
and heads for several tokens) hand over those from before it. With aux states on, the very same field holds
those: see `sglang_aux_responses`.
"""

from __future__ import annotations

from hsprobe.errors import HsprobeError
from hsprobe.formats.dump import Final, Layout, Match, Options, Reader, Sure
from hsprobe.formats.readers import _responses
from hsprobe.formats.source import Source

KEY = "sglang-responses"
NAME = "SGLang answers with final hidden states"


def detect(source: Source) -> Match | None:
    """By meta_info.hidden_states. That it is not aux states cannot be told."""
    return Match(2, "meta_info has hidden_states") if _responses.found_in(source) else None


def open_dump(source: Source, options: Options) -> Reader:
    """See `Format`."""
    found = _responses.first(source)
    if found is None:
        raise HsprobeError(
            f"{source.path} holds no answer of SGLang with hidden states.",
            "Ask for them with return_hidden_states, from a server with --enable-return-hidden-states.",
        )
    layout = Layout(hidden=_responses.width(found), final=Final("post", Sure.DEFAULT))
    return _responses.Answers(source, layout, "final")
