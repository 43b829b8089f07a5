"""The order in which people count: data_2 before data_10."""

from __future__ import annotations

import re

_NUMBERS = re.compile(r"(\d+)")


def natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts the numbers in names as numbers."""
    return [
        (int(part), "") if part.isdecimal() and len(part) < 20 else (-1, part)
        for part in _NUMBERS.split(name)
    ]
