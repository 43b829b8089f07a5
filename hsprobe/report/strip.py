"""Error against noise over all depths and phases, as a strip of one mark a depth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from hsprobe.diagnose.model import Depth, Divergence, LayerLine, PhaseLine
from hsprobe.diagnose.naming import depth_name
from hsprobe.diagnose.wording import figure

_BARS, _DIGITS = "▁▂▃▄▅▆▇█", "12345678"
_PASSES, _NO_ROWS = "·", " "
_MARGIN = 12
_BAD, _DIM = "bold red", "dim"


@dataclass(frozen=True)
class Strip:
    """The strip of some depths; as wide as the console, in ASCII where its encoding has no bars."""

    lines: Sequence[LayerLine]
    divergence: Divergence | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        plain = not _encodes(options.encoding, _BARS + _PASSES)
        phases = list(dict.fromkeys(p.phase for line in self.lines for p in line.phases))
        margin = max(_MARGIN, *map(len, phases)) + 2
        room = max(8, options.max_width - margin - 2)
        # Where there are more depths than columns, a column stands for several: for the worst of them.
        per = -(-len(self.lines) // room)
        groups = [self.lines[i : i + per] for i in range(0, len(self.lines), per)]
        space = " " if 2 * len(groups) <= room else ""
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(width=margin - 2, no_wrap=True)
        grid.add_column(no_wrap=True)
        for phase in phases:
            grid.add_row(phase, _row(groups, phase, space, plain))
        grid.add_row(Text("depth", style=_DIM), Text(_axis(groups, len(space) + 1), style=_DIM))
        yield grid
        yield Text(_legend(plain, per), style=_DIM)
        if self.divergence is not None:
            yield Text(_sentence(self.divergence))


def level(line: PhaseLine) -> int:
    """0 within noise, else 1 to 8: half a power of ten a step, of the tolerance needed over the noise."""
    if line.passes_at is None or math.isnan(line.passes_at) or line.passes_at <= line.noise:
        return 0
    return min(8, 1 + int(2 * math.log10(line.passes_at / line.noise)))


def _row(groups: Sequence[Sequence[LayerLine]], phase: str, space: str, plain: bool) -> Text:
    text = Text()
    for group in groups:
        here = [p for line in group for p in line.phases if p.phase == phase and p.rows]
        worst = max((level(p) for p in here), default=-1)
        mark = _NO_ROWS if worst < 0 else ("." if plain else _PASSES) if worst == 0 else ""
        text.append(mark or (_DIGITS if plain else _BARS)[worst - 1], style=_BAD if worst > 0 else "")
        text.append(space)
    return text


def _axis(groups: Sequence[Sequence[LayerLine]], step: int) -> str:
    """Depths below their columns: every fifth or so, and F for the final norm."""
    axis = [" "] * (step * len(groups) + 8)
    free = 0
    for number, group in enumerate(groups):
        depth: Depth = group[0].depth
        name = "F" if depth == "final" else str(depth)
        wanted = depth == "final" or number % (5 if step == 2 else 10) == 0
        if wanted and step * number < free and depth == "final":
            axis[step * number - 3 : step * number] = "   "
        if wanted and (step * number >= free or depth == "final"):
            axis[step * number : step * number + len(name)] = name
            free = step * number + len(name) + 1
    return "".join(axis).rstrip()


def _legend(plain: bool, per: int) -> str:
    passes, bars = (".", _DIGITS) if plain else (_PASSES, _BARS)
    several = f"; {per} depths a column" if per > 1 else ""
    return f"{passes} within noise; {bars} over it, up to 3, 10, 30... times{several}"


def _sentence(found: Divergence) -> str:
    request = "an unknown request" if found.request is None else f"request {found.request}"
    times = found.error / found.noise if found.noise else math.inf
    return (
        f"first at {depth_name(found.depth)}: {found.phase}, {request}, position {found.position}, token "
        f"{found.token}; error {figure(found.error)}, {times:,.3g} times the expected noise"
    )


def _encodes(encoding: str, marks: str) -> bool:
    try:
        marks.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True
