"""The ranks of a capture, for people: a line when they agree, else each against the one it should equal."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hsprobe.diagnose.model import RankLine, Ranks
from hsprobe.diagnose.wording import figure

# More than these are no longer read; those that differ come first.
_MOST = 16


def render(found: Ranks) -> RenderableType:
    """One line where no rank differs, else a table."""
    bad = [line for line in found.lines if line.differ]
    if not bad:
        return Text(found.summary)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name, side in _COLUMNS:
        table.add_column(name, justify="right" if side == "r" else "left", no_wrap=True)
    for line in [*bad, *(line for line in found.lines if not line.differ)][:_MOST]:
        _row(table, line)
    return table


_COLUMNS = (
    ("rank", "r"), ("place", "l"), ("against", "r"), ("rows", "r"), ("error", "r"), ("noise", "r"),
    ("differ", "r"), ("first", "l"), ("", "l"),
)  # fmt: skip


def place(line: RankLine) -> str:
    """`tp 1`, with pp and dp where they are not the first."""
    said = [f"tp {line.tp}", *(f"{a} {v}" for a, v in (("pp", line.pp), ("dp", line.dp)) if v)]
    return ", ".join(said)


def _row(table: Table, line: RankLine) -> None:
    table.add_row(
        str(line.rank),
        place(line),
        str(line.against),
        f"{line.rows:,}",
        Text(figure(line.error), style="bold red" if line.differ else ""),
        figure(line.noise),
        f"{line.differ}/{line.sites}",
        line.first,
        Text("!" if line.differ else "ok", style="bold red" if line.differ else "bold green"),
    )
