"""What `torch.save` wrote, without torch and without unpickling: nested mappings with `Stored` tensors.

A torch file is a zip with a pickle of the structure (`<folder>/data.pkl`) and one member, stored as it is,
for each storage. Files from before torch 1.6 are a bare pickle; those alone need torch (weights_only=True).
Source: torch/serialization.py and torch/_utils.py (_rebuild_tensor_v2, _v3) of torch 2.9.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hsprobe.formats.containers import pickled, zipped
from hsprobe.formats.containers.pickled import Name, Opaque, PickleError
from hsprobe.formats.stored import BITS, Array, Bytes, Stored, check_shape, damaged, stored_array, stored_at
from hsprobe.remote.location import Location
from hsprobe.remote.trouble import RemoteError

_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "UntypedStorage": "uint8",
}
_KEEP_AS_LIST = {
    ("collections", "OrderedDict"): dict,
    ("collections", "deque"): list,
    ("builtins", "set"): list,
}
_MAX_GATHERED = 1 << 28


def read(source: Bytes, members: dict[str, zipped.Entry]) -> Any:
    """The value in a torch file.

    Args:
        members: of the zip that the file is.

    Raises:
        HsprobeError: it is damaged, or made to do harm.
    """
    return _Reader(source, members).value()


class _Reader:
    def __init__(self, source: Bytes, members: dict[str, zipped.Entry]) -> None:
        self.source = source
        self.members = members
        pickles = [name for name in self.members if name.endswith("/data.pkl") or name == "data.pkl"]
        if len(pickles) != 1:
            raise damaged(source.name, "it is a zip file, but not one that torch wrote")
        self.pickle = self.members[pickles[0]]
        self.folder = pickles[0].removesuffix("data.pkl")

    def value(self) -> Any:
        order = self.members.get(f"{self.folder}byteorder")
        if order is not None and self._bytes(order) != b"little":
            raise damaged(self.source.name, "it was written on a big-endian machine")
        if self.pickle.size > pickled.MAX_BYTES:
            raise damaged(self.source.name, f"its structure alone takes {self.pickle.size:,} bytes")
        try:
            return pickled.read(self._bytes(self.pickle), self._call, _persistent)
        except PickleError as error:
            raise damaged(self.source.name, str(error)) from error

    def _bytes(self, entry: zipped.Entry) -> bytes:
        return bytes(self.source.read(zipped.stored_offset(self.source, entry), entry.size))

    def _call(self, what: object, arguments: object) -> object:
        if not isinstance(what, Name) or not isinstance(arguments, tuple):
            return Opaque(what)
        if what.module == "torch._utils" and what.name in ("_rebuild_tensor_v2", "_rebuild_tensor"):
            return self._tensor(*arguments[:4])
        if what.module == "torch._utils" and what.name == "_rebuild_tensor_v3":
            dtype = arguments[6]
            return self._tensor(*arguments[:4], dtype=dtype.name if isinstance(dtype, Name) else "?")
        if what.module == "torch._utils" and what.name == "_rebuild_parameter":
            return arguments[0]
        if (what.module, what.name) == ("torch", "Size"):
            return tuple(arguments[0])
        keep = _KEEP_AS_LIST.get((what.module.replace("__builtin__", "builtins"), what.name))
        if keep is dict:
            return {}
        if keep is list:
            return list(arguments[0]) if arguments and isinstance(arguments[0], list) else []
        return Opaque(what)

    def _tensor(
        self, storage: Any, offset: Any, shape: Any, strides: Any, *, dtype: str | None = None
    ) -> object:
        if not isinstance(storage, _Storage):
            raise damaged(self.source.name, "a tensor in it has no storage")
        dtype = dtype or storage.dtype
        name = f"{self.source.name}"
        entry = self.members.get(f"{self.folder}data/{storage.key}")
        if entry is None or dtype not in BITS:
            raise damaged(name, f"a tensor in it is missing, or of the type {dtype[:40]!r}")
        width = np.dtype(BITS[dtype]).itemsize
        sizes = check_shape(name, tuple(shape), dtype, entry.size)
        if not (isinstance(offset, int) and offset >= 0 and len(strides) == len(sizes)):
            raise damaged(name, "a tensor in it makes no sense")
        reach = 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True)) if math.prod(sizes) else 0
        if any(not isinstance(s, int) or s < 0 for s in strides) or (offset + reach) * width > entry.size:
            raise damaged(name, "a tensor in it reaches beyond its storage")

        def begin() -> int:
            return zipped.stored_offset(self.source, entry) + offset * width

        if _row_major(sizes, strides):
            return stored_at(name, self.source, begin, sizes, dtype)
        inner = reach - (sizes[0] - 1) * strides[0]
        return self._gathered(name, begin, sizes, strides, dtype, inner)

    def _gathered(
        self,
        name: str,
        begin: Callable[[], int],
        shape: tuple[int, ...],
        strides: Sequence[int],
        dtype: str,
        inner: int,
    ) -> Stored:
        """A tensor whose elements do not lie in order, such as some columns of a wider one.

        Args:
            inner: how many elements one entry of the first axis spans; only the entries asked for are read.
        """
        code = np.dtype(BITS[dtype])
        if inner * code.itemsize > _MAX_GATHERED:
            raise damaged(name, "a large tensor in it is a transposed view")
        each = math.prod(shape[1:])

        def fetch(first: int, count: int) -> Array:
            if not count:
                return np.empty(0, code)
            low, high = first // each, -(-(first + count) // each)
            span = (high - low - 1) * strides[0] + inner
            place = begin() + low * strides[0] * code.itemsize
            flat = stored_at(name, self.source, place, (span,), dtype).read()
            view = np.lib.stride_tricks.as_strided(
                flat, (high - low, *shape[1:]), [s * code.itemsize for s in strides]
            )
            return view.reshape(-1)[first - low * each : first - low * each + count]

        return Stored(name, shape, dtype, fetch, dense=False)


class _Storage:
    def __init__(self, dtype: str, key: str) -> None:
        self.dtype, self.key = dtype, key


def _persistent(found: object) -> object:
    """("storage", class, key, device, number of elements) as torch writes it."""
    if (
        isinstance(found, tuple)
        and len(found) == 5
        and isinstance(found[1], Name)
        and isinstance(found[2], str)
    ):
        return _Storage(_STORAGES.get(found[1].name, found[1].name), found[2])
    raise PickleError("its structure refers to what no torch file holds")


def _row_major(shape: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for n, stride in zip(reversed(shape), reversed(strides), strict=True):
        if n > 1 and stride != expected:
            return False
        expected *= n
    return True


def read_old(source: Bytes, path: Location) -> Any:
    """As `read`, of a file from before torch 1.6.

    Raises:
        HsprobeError: torch is not installed, or refuses to load it as data.
    """
    try:
        import torch
    except ImportError:
        raise damaged(
            source.name, "it was written by a torch before 1.6, and reading it needs torch"
        ) from None
    try:
        with path.open("rb") as file:
            return _described(source.name, torch.load(file, weights_only=True, map_location="cpu"))
    except RemoteError:
        raise
    except Exception as error:
        raise damaged(source.name, "it is not a torch file that holds nothing but data") from error


def _described(name: str, value: Any, depth: int = 0) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype not in BITS:
            raise damaged(name, f"a tensor in it is of the type {dtype}")
        bits = value.detach().contiguous()
        raw = bits.reshape(-1).view(torch.uint8).numpy().view(BITS[dtype]).reshape(tuple(value.shape))
        return stored_array(name, raw, dtype)
    if isinstance(value, dict) and depth < 8:
        return {key: _described(name, one, depth + 1) for key, one in value.items()}
    if isinstance(value, list | tuple) and depth < 8:
        return [_described(name, one, depth + 1) for one in value]
    return value
