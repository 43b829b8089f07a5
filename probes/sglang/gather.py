"""Copies several tensors into columns of one buffer with a single kernel.

Inside a CUDA graph a kernel costs more than a microsecond however little it copies, so what is there at the
same time is copied at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

Copy = tuple[torch.Tensor, torch.Tensor]
"""Where to, [R, bytes] uint8 with rows of any stride, and what, [R, W]."""

MOST = 8
"""Tensors for each kernel."""
_WORD = 8
_BLOCK = 1024


def gather(copies: Sequence[Copy]) -> None:
    """Copy bits, on the stream that is current. All targets are columns of one buffer."""
    wide = [(target, source) for target, source in copies if _lies_in_words(target, source)]
    for target, source in copies:
        if not _lies_in_words(target, source):
            target.view(source.dtype).copy_(source)
    if not wide or not wide[0][1].is_cuda:
        for target, source in wide:
            target.view(torch.int64).copy_(source.view(torch.int64))
        return
    for first in range(0, len(wide), MOST):
        _launch(wide[first : first + MOST])


def _lies_in_words(target: torch.Tensor, source: torch.Tensor) -> bool:
    size = source.element_size()
    numbers = (source.stride(0) * size, target.shape[1], source.data_ptr(), source.storage_offset() * size)
    return source.stride(1) == 1 and not any(int(number) % _WORD for number in numbers)


def _launch(copies: Sequence[Copy]) -> None:
    base = copies[0][0]
    sources, words, strides, offsets = [], [], [], []
    for target, source in copies:
        sources.append(source.view(torch.int64))
        words.append(target.shape[1] // _WORD)
        strides.append(sources[-1].stride(0))
        offsets.append((target.data_ptr() - base.data_ptr()) // _WORD)
    more = MOST - len(copies)
    grid = (base.shape[0], -(-max(words) // _BLOCK), len(copies))
    _kernel()[grid](
        base.view(torch.int64),
        base.stride(0) // _WORD,
        *sources,
        *sources[:1] * more,
        *words,
        *[0] * more,
        *strides,
        *[0] * more,
        *offsets,
        *[0] * more,
        BLOCK=_BLOCK,
    )


@cache
def _kernel() -> Any:
    """Triton is imported only where there is a GPU to run it."""
    from hsprobe.probes.sglang.kernel import copy_columns

    return copy_columns


@cache
def prepare(device: torch.device) -> None:
    """Compile the kernel, which cannot be done while a graph is captured."""
    if device.type == "cuda":
        gather(
            [
                (
                    torch.zeros(1, _WORD, dtype=torch.uint8, device=device),
                    torch.zeros(1, 1, device=device, dtype=torch.int64),
                )
            ]
        )
