"""How far two tensors are the same up to the rounding of their dtype, by the share of numbers that agree.

Letters: n rows of a tensor, R the first few of them, W its width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

ROWS = 8
"""Rows of a tensor that are looked at."""
LEAST_TOLERANCE = 1e-5
SUM_ROUNDINGS, NORM_ROUNDINGS = 2, 4
"""How many times the dtype's epsilon numbers may differ, relative to each."""


@dataclass(frozen=True)
class Sample:
    """The first rows of a tensor, copied.

    Attributes:
        n: rows of the whole tensor.
    """

    rows_RW: torch.Tensor
    n: int

    @classmethod
    def of(cls, tensor_nW: Any) -> Sample | None:
        """None of what is not a matrix of numbers."""
        if not isinstance(tensor_nW, torch.Tensor) or tensor_nW.ndim != 2:
            return None
        if not tensor_nW.is_floating_point():
            return None
        return cls(tensor_nW[:ROWS].detach().clone(), int(tensor_nW.shape[0]))

    @classmethod
    def beside(cls, samples: Sequence[Sample | None]) -> Sample | None:
        """Several side by side; None where one is missing or has other rows."""
        found = [one for one in samples if one is not None]
        if not found or len(found) < len(samples) or len({one.n for one in found}) > 1:
            return None
        return cls(torch.cat([one.rows_RW for one in found], dim=1), found[0].n)

    def like(self, other: Sample | None) -> bool:
        """Whether the two can be compared number by number."""
        return other is not None and self.n == other.n and self.rows_RW.shape == other.rows_RW.shape


def agreement(
    x: torch.Tensor, y: torch.Tensor, roundings: float, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """Share of numbers that differ by no more than rounding; NaN where there is none to compare.

    Args:
        roundings: how many epsilons of `x`'s dtype may lie between them, relative to `scale`, else to `y`.
    """
    tolerance = max(roundings * torch.finfo(x.dtype).eps, LEAST_TOLERANCE)
    x, y = x.float(), y.float()
    usable = x.isfinite() & y.isfinite()
    near = (x - y).abs() <= tolerance * (y.abs() if scale is None else scale)
    return (near & usable).sum() / usable.sum()


def norm_score(taken: Sample, before: Sample | None, result: Any, norm: Any) -> torch.Tensor | None:
    """Whether a norm of what was taken gives its result, and whether the state before would; [2]."""
    found = Sample.of(result)
    if found is None or not taken.like(found) or not callable(getattr(norm, "forward", None)):
        return None
    if found.rows_RW.dtype != taken.rows_RW.dtype:
        return None
    # Not through the module's call, which is watched. A norm may work in place.
    expected = norm.forward(taken.rows_RW.clone())
    if not isinstance(expected, torch.Tensor) or expected.shape != found.rows_RW.shape:
        return None
    shares = [agreement(found.rows_RW, expected, NORM_ROUNDINGS), torch.zeros_like(expected[:0].sum())]
    if before is not None and taken.like(before):
        shares[1] = agreement(found.rows_RW, norm.forward(before.rows_RW.clone()), NORM_ROUNDINGS)
    return torch.stack([share.float() for share in shares])


def sum_score(taken: Sample, before: Sample | None, branch: Sample | None) -> torch.Tensor | None:
    """Whether a state and what is added make what was taken, and whether the state alone does; [2]."""
    if branch is None or not taken.like(branch):
        return None
    if before is None:
        agree = agreement(taken.rows_RW, branch.rows_RW, SUM_ROUNDINGS)
        return torch.stack([agree, torch.zeros_like(agree)])
    if not taken.like(before):
        return None
    a, b = before.rows_RW.float(), branch.rows_RW.float()
    agree = agreement(taken.rows_RW, a + b, SUM_ROUNDINGS, a.abs() + b.abs())
    return torch.stack([agree, agreement(taken.rows_RW, a, SUM_ROUNDINGS, a.abs() + b.abs())])


def same_score(taken: Sample, expected: Sample) -> torch.Tensor | None:
    """Whether two are the same; [2], the second 0."""
    if not taken.like(expected):
        return None
    agree = agreement(taken.rows_RW, expected.rows_RW, SUM_ROUNDINGS)
    return torch.stack([agree, torch.zeros_like(agree)])
