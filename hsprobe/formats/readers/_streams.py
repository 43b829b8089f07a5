"""The residual stream among the outputs of modules, by their names: norms hand it on as their second output.

Letters: T rows of a pass, H channels, L layers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hsprobe.formats.stored import Stored

_NORM = re.compile(r"(?P<model>.+)\.layers\.(?P<layer>\d{1,4})\.input_layernorm")
_LAYER = re.compile(r".+\.layers\.(\d{1,4})\..+")


def located(outputs: Mapping[str, Any]) -> dict[str, Stored]:
    """What of a pass is the stream at a known depth, by its name in a trace.

    Args:
        outputs: module -> its output, a tensor [T, H] or a list of several.
    """
    found: dict[str, Stored] = {}
    model = None
    for name, value in outputs.items():
        match = _NORM.fullmatch(name)
        if match is None:
            continue
        model = model or match["model"]
        # The first layer's norm gets no residual beside its input: the embedding is what enters it.
        second = _second(value)
        if match["model"] == model and second is not None and int(match["layer"]):
            found[f"layer/{int(match['layer']):03d}"] = second
    if model is None:
        return {}
    norm = outputs.get(f"{model}.norm")
    embed = _table(outputs.get(f"{model}.embed_tokens"))
    if embed is not None:
        found["layer/000"] = embed
    first = _table(norm[0] if isinstance(norm, list) and norm else norm)
    if first is not None:
        found["final"] = first
    layers, last = _layers(outputs), _second(norm)
    if layers and last is not None:
        found[f"layer/{layers:03d}"] = last
    width = {one.shape[1] for one in found.values()}
    return dict(sorted(found.items())) if len(width) == 1 else {}


def _layers(outputs: Mapping[str, Any]) -> int:
    """L, where every layer from the first on is there; else 0, since the last cannot be told."""
    seen = {int(match[1]) for name in outputs if (match := _LAYER.fullmatch(name))}
    return len(seen) if seen == set(range(len(seen))) else 0


def _second(value: Any) -> Stored | None:
    return _table(value[1]) if isinstance(value, list) and len(value) == 2 else None


def _table(value: Any) -> Stored | None:
    fits = isinstance(value, Stored) and value.ndim == 2 and value.is_float and value.shape[1] > 0
    return value if fits else None
