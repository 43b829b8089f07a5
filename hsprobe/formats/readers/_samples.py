"""What readers share: a folder with one sample a file, and the fields of a sample checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hsprobe.errors import HsprobeError
from hsprobe.formats.dump import Layout, Sample
from hsprobe.formats.source import Source
from hsprobe.formats.stored import Ints, Stored, damaged

_TRIED = 8
Parse = Callable[[str, dict[str, Any]], Sample]


class FileSamples:
    """A dump with one sample in each file.

    Args:
        suffixes: of the files that are samples.
        parse: (name, content) -> the sample.
    """

    def __init__(self, source: Source, layout: Layout, suffixes: tuple[str, ...], parse: Parse) -> None:
        self.layout = layout
        self._source, self._suffixes, self._parse = source, suffixes, parse

    def names(self) -> Iterator[str]:
        """See `Reader`."""
        return self._source.files(*self._suffixes)

    def tokens(self, name: str) -> Ints | None:
        """See `Reader`."""
        return self.sample(name).tokens

    def sample(self, name: str) -> Sample:
        """See `Reader`."""
        content = self._source.load(name)
        if not isinstance(content, dict):
            raise damaged(name, "it holds no named tensors")
        return self._parse(name, content)


def first_samples(source: Source, *suffixes: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and contents of the first files that can be read: mappings only."""
    for name in source.peek(*suffixes, count=_TRIED):
        try:
            content = source.load(name)
        except HsprobeError:
            continue
        if isinstance(content, dict):
            yield name, content


def first_sample(source: Source, *suffixes: str) -> tuple[str, dict[str, Any]] | None:
    """The first file that can be read, None without one."""
    return next(first_samples(source, *suffixes), None)


def typical_sample(source: Source, *suffixes: str) -> dict[str, Any]:
    """The content of the first file that can be read, empty without one."""
    found = first_sample(source, *suffixes)
    return {} if found is None else found[1]


def needed_sample(source: Source, format_name: str, *suffixes: str) -> tuple[str, dict[str, Any]]:
    """Name and content of the first file that can be read.

    Raises:
        HsprobeError: there is none.
    """
    found = first_sample(source, *suffixes)
    if found is None:
        raise HsprobeError(
            f"{source.path} holds no sample of {format_name} that can be read.",
            f"Give the folder with its {' or '.join(suffixes)} files.",
        )
    return found


def tensor(name: str, content: dict[str, Any], key: str, *ranks: int) -> Stored:
    """A tensor that has to be there, with one of these numbers of axes.

    Raises:
        HsprobeError: it is missing, or another thing.
    """
    found = content.get(key)
    if not isinstance(found, Stored):
        raise damaged(name, f"it has no tensor {key}")
    if ranks and found.ndim not in ranks:
        raise damaged(name, f"its {key} has the shape {list(found.shape)}")
    return found


def ids(name: str, content: dict[str, Any], key: str = "input_ids") -> Ints:
    """Token ids [S], whether stored as [S] or [1, S].

    Raises:
        HsprobeError: they are missing, or no ids.
    """
    found = tensor(name, content, key)
    if not found.size or found.size != found.shape[-1]:
        raise damaged(name, f"its {key} has the shape {list(found.shape)}")
    values = found.integers()
    if int(values.min()) < 0:
        raise damaged(name, f"its {key} holds a negative token id")
    return values


def mask(content: dict[str, Any], key: str = "loss_mask") -> Ints | None:
    """A mask [S], None where there is none that fits."""
    found = content.get(key)
    return found.integers() if isinstance(found, Stored) and not found.is_float else None


def unpadded(tokens: Ints, loss_mask: Ints | None) -> int:
    """How many tokens are left without a tail of id 0 that takes no part in the loss; at least one."""
    real = tokens != 0
    if loss_mask is not None and len(loss_mask) == len(tokens):
        real |= loss_mask != 0
    found = np.flatnonzero(real)
    return int(found[-1]) + 1 if len(found) else 1
