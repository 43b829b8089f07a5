"""Tensors in `.safetensors` or `.npz` files, under names that tell what they are; hsprobe's own among them.

`input_ids` or `token_ids`, `aux`, `final`, `embed`, `layer/3`, and what masks and lengths tell of padding.
Layer ids are recorded only by `hsprobe convert`, in the metadata of the file; others are depths.
"""

from __future__ import annotations

import re
from typing import Any

from hsprobe.errors import HsprobeError
from hsprobe.formats.containers.tensors import parse_json
from hsprobe.formats.dump import DEPTHS, Chunks, Final, Layout, Match, Numbering, Options, Reader, Sure
from hsprobe.formats.readers._samples import needed_sample, typical_sample
from hsprobe.formats.readers._tables import ABOUT_TOKENS, Table, TableSamples, chunks_of, width_of
from hsprobe.formats.source import Source
from hsprobe.formats.stored import Stored, damaged

KEY = "plain"
NAME = "plain tensors"
_SUFFIXES = (".safetensors", ".npz")
_ALIASES = {
    "token_ids": "input_ids",
    "aux_hidden_states": "aux",
    "aux_hidden_state": "aux",
    "last_hidden_state": "final",
    "last_hidden_states": "final",
}
_LAYER = re.compile(r"layers?[._/-]?(\d{1,4})")


def detect(source: Source) -> Match | None:
    """By hsprobe's own metadata, or token ids and a state under a name known here."""
    content = typical_sample(source, *_SUFFIXES)
    if _metadata(content):
        return Match(3, "hsprobe wrote it")
    named = _named(content)
    if "input_ids" in named and any(_is_state(name) for name in named):
        return Match(1, "its tensors are named as in a trace")
    return None


def _metadata(content: dict[str, Any]) -> dict[str, Any]:
    found = content.get("__metadata__")
    text = found.get("hsprobe") if isinstance(found, dict) else None
    if not isinstance(text, str):
        return {}
    try:
        about = parse_json(text.encode(), "metadata")
    except HsprobeError:
        return {}
    return about if isinstance(about, dict) else {}


def _named(content: dict[str, Any]) -> dict[str, Stored]:
    """Tensors by their names in a trace."""
    found: dict[str, Stored] = {}
    for key, value in content.items():
        if isinstance(value, Stored):
            layer = _LAYER.fullmatch(key)
            found[f"layer/{int(layer[1]):03d}" if layer else _ALIASES.get(key, key)] = value
    return found


def _is_state(name: str) -> bool:
    return name in ("aux", "final", "embed") or name.startswith("layer/")


def open_dump(source: Source, options: Options) -> Reader:
    """See `Format`."""
    _, content = needed_sample(source, NAME, *_SUFFIXES)
    states = {name: found for name, found in _named(content).items() if _is_state(name)}
    layout = _layout(states, _metadata(content))
    return TableSamples(layout, lambda: source.files(*_SUFFIXES), lambda name: _table(source, name))


def _layout(states: dict[str, Stored], about: dict[str, Any]) -> Layout:
    model = about.get("model")
    model = model if isinstance(model, dict) else {}
    hidden = width_of(states)
    aux = chunks_of(states, Numbering(DEPTHS, 0), hidden)
    depths, count = about.get("depths"), about.get("chunks")
    if aux is not None and isinstance(count, int) and 0 < count < 4096:
        aux = Chunks(count, aux.numbering)
    if aux is not None and isinstance(depths, list) and all(type(d) is int for d in depths):
        aux = Chunks(len(depths), aux.numbering, tuple(depths), Sure.RECORDED)
    final = None
    if "final" in states:
        final = Final("post", Sure.RECORDED) if about else Final(None, Sure.UNKNOWN)
    return Layout(hidden=hidden, aux=aux, final=final, model=model)


def _table(source: Source, name: str) -> Table:
    content = source.load(name)
    if not isinstance(content, dict):
        raise damaged(name, "it holds no named tensors")
    named = _named(content)
    states = tuple(sorted(key for key in named if _is_state(key)))
    known = {key: value for key, value in named.items() if key in ABOUT_TOKENS or key in states}
    known |= {key: value for key, value in named.items() if key.endswith(".start")}
    return Table(name, states, known.get)
