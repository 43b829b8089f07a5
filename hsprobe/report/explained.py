"""Fault classes and rules in words, for `hsprobe explain`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from hsprobe.report.terminal import printed

_CODE, _HEAD = "bold", "dim"


class Entry(Protocol):
    """What a fault class and a rule have in common."""

    @property
    def code(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def summary(self) -> str: ...


def entry(found: Entry, parts: Sequence[tuple[str, str]]) -> str:
    """One class or rule: a line that says what is wrong, then its parts, each with its heading."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style=_HEAD)
    grid.add_column(overflow="fold")
    for heading, text in parts:
        grid.add_row(heading.lower(), text)
    title = Text.assemble((f"{found.code} {found.name}", _CODE), f"  {found.summary}")
    return _shown(Group(title, Text(""), grid))


def listing(catalogue: Sequence[Entry], groups: Mapping[str, str]) -> str:
    """All of them, a line each, by group (the first three letters of the code)."""
    parts: list[RenderableType] = []
    grid = Table.grid(padding=(0, 2, 0, 0))
    group = ""
    for found in catalogue:
        if found.code[:3] != group:
            group = found.code[:3]
            grid = Table.grid(padding=(0, 2, 0, 0))
            grid.add_column(no_wrap=True, style=_CODE)
            grid.add_column(no_wrap=True, min_width=14)
            grid.add_column(overflow="fold")
            parts += [Text(""), Text(groups.get(group, group), style=_HEAD), grid]
        grid.add_row(found.code, found.name, found.summary)
    return _shown(Group(*parts[1:]))


def _shown(what: RenderableType) -> str:
    return printed(what, Console(highlight=False, emoji=False, markup=False)).rstrip()
