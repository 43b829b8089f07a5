"""Depths in words, beside the producers' own numbering."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from hsprobe.trace.schema import Phase

Depth = int | Literal["final"] | None


def depth_name(depth: Depth) -> str:
    """`depth 3 (output of layer 2)`, `the embedding output (depth 0)`, `the output of the final norm`."""
    if depth is None:
        return "an unknown depth"
    if depth == "final":
        return "the output of the final norm"
    if depth == 0:
        return "the embedding output (depth 0)"
    return f"depth {depth} (output of layer {depth - 1})"


def short(depth: Depth) -> str:
    """As `depth_name`, for a table cell."""
    if depth is None:
        return "?"
    if depth == "final":
        return "final norm"
    return "0 (embedding)" if depth == 0 else f"{depth} (layer {depth - 1})"


def listed(depths: Iterable[Depth]) -> str:
    """`3, 6, 9`"""
    return ", ".join("?" if d is None else str(d) for d in depths)


def plural(count: int, noun: str) -> str:
    """`1 row`, `2 rows`, `1,000 rows`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def numbers(values: Sequence[int]) -> str:
    """`0`, `0 and 1`, `0, 1 and 2`."""
    words = [str(value) for value in values]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def phase_name(phase: int) -> str:
    """`prefill`, `decode`, `verify`, `draft extend`, `draft decode`."""
    return Phase(phase).name.lower().replace("_", " ")
