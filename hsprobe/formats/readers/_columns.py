"""Some columns of a wider tensor, and tensors stored scaled: views that read only what is asked for.

Letters: n rows, W width of the tensor in the file.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from hsprobe.formats.stored import Array, Stored, damaged


def columns(tensor: Stored, start: int, stop: int) -> Stored:
    """Columns start..stop of a table [n, W]. -> [n, stop - start]"""
    n, wide = tensor.shape
    width = stop - start

    def fetch(first: int, count: int) -> Array:
        if not count:
            return tensor.read(0, 0)[:, start:stop].reshape(-1)
        low, high = first // width, -(-(first + count) // width)
        part = tensor.read(low, high)[:, start:stop].reshape(-1)
        return part[first - low * width : first - low * width + count]

    if not 0 <= start < stop <= wide:
        raise damaged(
            tensor.name, f"it has {wide} columns, and the ones from {start} to {stop} are asked for"
        )
    return Stored(tensor.name, (n, width), tensor.dtype, fetch, dense=False)


def scaled(tensor: Stored, scales: Stored) -> Stored:
    """A table [n, W] of float8 times one scale a row, as bfloat16.

    Rounded as hs-connectors 0.9 rounds (fp8_utils.dequantize_fp8_tensor): the scale first, then the product.
    """
    n, width = tensor.shape
    if scales.size != n or scales.dtype != "float32" or tensor.dtype != "float8_e4m3fn":
        raise damaged(tensor.name, "its values and their scales do not fit together")
    flat = scales.reshape((n,))

    def fetch(first: int, count: int) -> Array:
        if not count:
            return np.empty(0, np.uint16)
        low, high = first // width, -(-(first + count) // width)
        values = tensor.read(low, high).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        factor = flat.read(low, high).astype(ml_dtypes.bfloat16).astype(np.float32)
        # The product of two bfloat16 fits a float32 exactly, so it is rounded once, here as there.
        with np.errstate(over="ignore", invalid="ignore"):
            product: Array = (values * factor[:, None]).astype(ml_dtypes.bfloat16).view(np.uint16)
        found: Array = product.reshape(-1)[first - low * width : first - low * width + count]
        return found

    return Stored(tensor.name, (n, width), "bfloat16", fetch, dense=False)
