"""Read single weights of a model folder, and try whether a served MLP computes with them.

Shapes: n rows, H channels, I width of the MLP.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from hsprobe.compare.noise import MEDIAN_ALLOWANCE
from hsprobe.compare.statistics import Floats
from hsprobe.diagnose.forms import PLAIN, measure, rms_normed

_KINDS = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}
_MOST_BYTES = 1 << 29
_MATRICES = ("gate_proj", "up_proj", "down_proj")
# A rounding of the weights explains the served MLP when it leaves this share of the error.
_EXPLAINS = 0.2


class Match(Enum):
    """How a served MLP relates to the weights in a folder."""

    EQUAL = "the weights on disk"
    ROUNDED = "the weights on disk, rounded"
    OTHER = "other weights"


@dataclass(frozen=True)
class WeightTest:
    """What came of it: `layer` was tried, `scheme` explains it, `error` is left, of `before`."""

    match: Match
    folder: str
    layer: int
    scheme: str
    error: float
    before: float


def tensors(folder: object, wanted: Callable[[str, list[int]], bool]) -> dict[str, Floats]:
    """Tensors of a folder's safetensors files by name, as float32; empty where it cannot be read."""
    if not isinstance(folder, str) or not Path(folder).is_dir():
        return {}
    found: dict[str, Floats] = {}
    try:
        for path in sorted(Path(folder).glob("*.safetensors")):
            found.update(_tensors_in(path, wanted))
    except (OSError, ValueError, KeyError, TypeError, MemoryError):
        # Weights are a help, never a need: what was read so far is what there is.
        return found
    return found


def _tensors_in(path: Path, wanted: Callable[[str, list[int]], bool]) -> Iterator[tuple[str, Floats]]:
    """By hand: safetensors' numpy reader knows no bfloat16."""
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > path.stat().st_size:
            return
        header: dict[str, Any] = json.loads(stream.read(length))
        for name, entry in header.items():
            if not isinstance(entry, dict) or "shape" not in entry or not wanted(name, entry["shape"]):
                continue
            kind = _KINDS.get(entry["dtype"])
            start, stop = entry["data_offsets"]
            size = int(np.prod(entry["shape"], dtype=np.int64))
            if kind is None or stop - start != size * kind.itemsize or stop - start > _MOST_BYTES:
                continue
            stream.seek(8 + length + start)
            data = np.frombuffer(stream.read(stop - start), kind)
            yield name, data.astype(np.float32).reshape(entry["shape"])


def mlp_test(
    folder: object, layer: int, middle_nH: Floats, after_nH: Floats, noise: float
) -> WeightTest | None:
    """Whether layer's MLP, from the stream before and after it, is that of the folder's weights.

    Returns:
        None where the folder holds no such MLP or cannot be read.
    """
    prefix = f"model.layers.{layer}."
    names = {f"{prefix}mlp.{name}.weight" for name in _MATRICES} | {
        f"{prefix}post_attention_layernorm.weight"
    }
    found = tensors(folder, lambda name, _: name in names)
    if set(found) != names or not _gated_by_silu(folder):
        return None
    gate, up, down = (found[f"{prefix}mlp.{name}.weight"] for name in _MATRICES)
    unit = rms_normed(middle_nH) * found[f"{prefix}post_attention_layernorm.weight"]
    served = after_nH - middle_nH
    spread = np.abs(after_nH) + np.abs(middle_nH)
    before = measure(served, _mlp(unit, gate, up, down), noise, spread, PLAIN)
    known = (str(folder), layer)
    if before.good:
        return WeightTest(Match.EQUAL, *known, "", before.error, before.error)
    for scheme, rounded in _SCHEMES.items():
        weights = [rounded(weight) for weight in (gate, up, down)]
        error = measure(served, _mlp(unit, *weights), noise, spread, PLAIN).error
        if error <= max(_EXPLAINS * before.error, MEDIAN_ALLOWANCE * before.expected):
            return WeightTest(Match.ROUNDED, *known, scheme, error, before.error)
    return WeightTest(Match.OTHER, *known, "", before.error, before.error)


def _gated_by_silu(folder: object) -> bool:
    try:
        config: Mapping[str, Any] = json.loads((Path(str(folder)) / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return config.get("hidden_act") == "silu" and not config.get("mlp_bias")


def _mlp(unit_nH: Floats, gate_IH: Floats, up_IH: Floats, down_HI: Floats) -> Floats:
    g = unit_nH @ gate_IH.T
    with np.errstate(over="ignore"):
        active = g / (1.0 + np.exp(-g)) * (unit_nH @ up_IH.T)
    out: Floats = active @ down_HI.T
    return out


def _integers(weight: Floats, largest: int, group: int) -> Floats:
    """Rounded to integers times one scale a group of input channels; a row where `group` is 0."""
    size = group or weight.shape[1]
    if weight.shape[1] % size:
        return weight
    parts = weight.reshape(-1, size)
    scale = np.maximum(np.abs(parts).max(axis=1, keepdims=True), 1e-12) / largest
    rounded: Floats = (np.clip(np.round(parts / scale), -largest, largest) * scale).reshape(weight.shape)
    return rounded


def _fp8(weight: Floats) -> Floats:
    scale = np.maximum(np.abs(weight).max(axis=1, keepdims=True), 1e-12) / 448.0
    rounded: Floats = (weight / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale
    return rounded


_SCHEMES: dict[str, Callable[[Floats], Floats]] = {
    "8-bit integers": lambda w: _integers(w, 127, 0),
    "fp8 e4m3": _fp8,
    "4-bit integers, groups of 32": lambda w: _integers(w, 7, 32),
    "4-bit integers, groups of 64": lambda w: _integers(w, 7, 64),
    "4-bit integers, groups of 128": lambda w: _integers(w, 7, 128),
    "4-bit integers": lambda w: _integers(w, 7, 0),
}
