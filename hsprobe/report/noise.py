"""What noise was measured, for people."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from hsprobe.compare.tolerance import Figure
from hsprobe.diagnose.learn import Learned
from hsprobe.diagnose.naming import Depth, phase_name, short
from hsprobe.diagnose.wording import figure as number
from hsprobe.report.terminal import note_blocks, printed

_COLUMNS = ("depth", "phase", "rows", "median", "99.5 %", "largest", "noise", "model")


def write(learned: Learned, path: Path, stream: TextIO) -> None:
    """Write a table a pair of dtypes, and where the figures went."""
    console = Console(file=stream, highlight=False, emoji=False, markup=False)
    stream.write(printed(Group(*_parts(learned, path)), console))


def _parts(learned: Learned, path: Path) -> list[RenderableType]:
    tolerance = learned.tolerance
    parts: list[RenderableType] = []
    for pair in dict.fromkeys(figure.dtypes for figure in tolerance.figures):
        parts.append(Text(f"row errors between {' and '.join(pair)}"))
        parts.append(_table(learned, [figure for figure in tolerance.figures if figure.dtypes == pair]))
        parts.append(Text(""))
    parts.append(
        Text(
            f"noise is what `hsprobe diff --noise {path}` will expect, {tolerance.safety:g} times what was "
            "measured taken into account; model is what it would expect without.",
            style="dim",
        )
    )
    parts += note_blocks(learned.notes)
    parts.append(Text(f"{len(tolerance.figures)} figures written to {path}", style="bold"))
    return parts


def _table(learned: Learned, figures: Sequence[Figure]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name in ("depth", "phase") else "right", no_wrap=True)
    last: int | str | None = None
    for found in figures:
        depth: Depth = found.depth if isinstance(found.depth, int) else "final"
        table.add_row(
            short(depth) if found.depth != last else "",
            phase_name(found.phase),
            f"{found.rows:,}",
            number(found.median),
            number(found.q995),
            number(found.largest),
            number(found.expected(learned.tolerance.safety)),
            number(learned.model.level(depth, found.dtypes).expected),
        )
        last = found.depth
    return table
