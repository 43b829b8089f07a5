"""Rotary position embedding of a draft: frequencies by kind of scaling, and the rotation itself.

The formulas are those of the papers and of ``sglang/srt/layers/rotary_embedding`` (0.5.23), which agree with
transformers' ``modeling_rope_utils`` for the kinds here.

Shapes: T rows, N heads, D channels of a head, F = dims / 2 frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hsprobe.draft.config import Rope
from hsprobe.errors import HsprobeError

KINDS = ("default", "linear", "llama3", "yarn")


def frequencies(rope: Rope) -> tuple[Tensor, float]:
    """Angle a position, and the factor on the rotated vector (1 but for yarn). -> [F] float64.

    Raises:
        HsprobeError: the kind of scaling is not known, or lacks a number.
    """
    exponent_F = torch.arange(0, rope.dims, 2, dtype=torch.float64) / rope.dims
    plain_F = rope.base**-exponent_F
    try:
        if rope.kind == "default":
            return plain_F, 1.0
        if rope.kind == "linear":
            return plain_F / float(rope.scaling["factor"]), 1.0
        if rope.kind == "llama3":
            return _llama3(plain_F, rope.scaling, rope.limit), 1.0
        if rope.kind == "yarn":
            return _yarn(plain_F, rope)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise HsprobeError(
            f"The RoPE scaling of the draft ({rope.kind}) is not whole: {type(error).__name__} {error}.",
            "Check rope_scaling in its config.json.",
        ) from None
    raise HsprobeError(
        f"RoPE scaling of type {rope.kind!r} is not known.", f"hsprobe computes {', '.join(KINDS)}."
    )


def _llama3(plain_F: Tensor, scaling: Mapping[str, Any], limit: int) -> Tensor:
    factor = float(scaling["factor"])
    low, high = float(scaling.get("low_freq_factor", 1.0)), float(scaling.get("high_freq_factor", 4.0))
    trained = float(scaling.get("original_max_position_embeddings", limit))
    turns_F = trained * plain_F / (2 * math.pi)
    blend_F = ((turns_F - low) / (high - low)).clamp(0, 1) if high != low else (turns_F > high).double()
    return plain_F * (blend_F + (1 - blend_F) / factor)


def _yarn(plain_F: Tensor, rope: Rope) -> tuple[Tensor, float]:
    scaling = rope.scaling
    factor = float(scaling["factor"])
    trained = float(scaling.get("original_max_position_embeddings", rope.limit))

    def place(turns: float) -> float:
        return rope.dims * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(rope.base))

    low, high = place(float(scaling.get("beta_fast", 32))), place(float(scaling.get("beta_slow", 1)))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dims - 1)
    if low == high:
        high += 0.001
    ramp_F = ((torch.arange(len(plain_F), dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    keep_F = (1 - ramp_F) * float(scaling.get("extrapolation_factor", 1))
    return plain_F * (keep_F + (1 - keep_F) / factor), _yarn_magnitude(factor, scaling)


def _yarn_magnitude(factor: float, scaling: Mapping[str, Any]) -> float:
    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    one, all_dims = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if one is not None and all_dims is not None:
        size = magnitude(float(one)) / magnitude(float(all_dims))
    else:
        size = magnitude(1.0)
    return size * float(scaling.get("attn_factor", 1.0))


class Rotation:
    """Rotates queries and keys by their positions.

    Raises:
        HsprobeError: as of `frequencies`.
    """

    def __init__(self, rope: Rope) -> None:
        self._rope = rope
        self._frequency_F, self._magnitude = frequencies(rope)

    def __call__(self, x_TND: Tensor, positions_T: Tensor) -> Tensor:
        """[T, N, D] at integer positions [T] -> [T, N, D], same dtype."""
        rope = self._rope
        angle_TF = positions_T.double()[:, None] * self._frequency_F.to(x_TND.device)
        cos = (angle_TF.cos() * self._magnitude).to(x_TND.dtype)[:, None]
        sin = (angle_TF.sin() * self._magnitude).to(x_TND.dtype)[:, None]
        turned, rest = x_TND[..., : rope.dims], x_TND[..., rope.dims :]
        if rope.neox:
            low, high = turned.chunk(2, dim=-1)
            out = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
        else:
            even, odd = turned[..., ::2], turned[..., 1::2]
            out = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
        return torch.cat((out, rest), dim=-1)
