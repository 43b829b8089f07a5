"""The order in which people count: data_2 before data_10."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import repeat

_DIGITS = "0123456789"
_NUMBERS = re.compile(r"(\d+)")


def natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts the numbers in names as numbers."""
    return [
        (int(part), "") if part.isdecimal() and len(part) < 20 else (-1, part)
        for part in _NUMBERS.split(name)
    ]


def in_natural_order(names: Sequence[str]) -> list[str]:
    """The names, sorted so.

    Where they differ in one number alone, as the files of a large dump do, many times as fast as by keys.
    """
    before = _beginning(names).rstrip(_DIGITS)
    low = len(before)
    after = names[0][low:].lstrip(_DIGITS) if names else ""
    high = -len(after) or None
    middle = [name[low:high] for name in names] if all(map(str.endswith, names, repeat(after))) else [""]
    digits = "".join(middle)
    if not (digits.isascii() and digits.isdecimal() and all(middle)) or max(map(len, middle)) >= 20:
        return sorted(names, key=natural)
    ordered = sorted(names)
    zeros = [name for name in ordered[:2] if name[low] == "0"]
    if zeros and zeros != [f"{before}0{after}"]:
        # With zeros in front, the longer number is not always the larger.
        return [names[i] for i in sorted(range(len(names)), key=[*map(int, middle)].__getitem__)]
    ordered.sort(key=len)
    return ordered


def _beginning(names: Sequence[str]) -> str:
    """What all of them begin with: whatever the first and the last in the alphabet have in common."""
    first, last = min(names, default=""), max(names, default="")
    same = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return first[:same]
