"""The order in which people count: data_2 before data_10."""

from __future__ import annotations

import re
from collections.abc import Sequence

_NUMBERS = re.compile(r"(\d+)")


def natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts the numbers in names as numbers."""
    return [
        (int(part), "") if part.isdecimal() and len(part) < 20 else (-1, part)
        for part in _NUMBERS.split(name)
    ]


def in_natural_order(names: Sequence[str]) -> list[str]:
    """The names, sorted so.

    Where they differ in one number alone, as the files of a large dump do, ten times as fast as by keys.
    """
    before = _beginning(names).rstrip("0123456789")
    after = _beginning([name[::-1] for name in names])[::-1].lstrip("0123456789")
    middle = [name[len(before) : len(name) - len(after)] for name in names]
    lengths, digits = [*map(len, middle)], "".join(middle)
    if names and min(lengths) > 0 and max(lengths) < 20 and digits.isascii() and digits.isdecimal():
        return [names[i] for i in sorted(range(len(names)), key=[*map(int, middle)].__getitem__)]
    return sorted(names, key=natural)


def _beginning(names: Sequence[str]) -> str:
    """What all of them begin with: whatever the first and the last in the alphabet have in common."""
    first, last = min(names, default=""), max(names, default="")
    same = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return first[:same]
