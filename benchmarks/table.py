"""The lines that benchmarks print: what was measured, what it was to reach, and whether it did."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Row:
    """One line.

    Attributes:
        work: what was done. value: what was measured, in `unit`.
        aim: what to reach, None where a line is there for information alone; `most`: whether the value may be
            at most that, rather than at least.
        note: what it was measured against, with the figures.
    """

    work: str
    value: float
    unit: str
    aim: float | None = None
    most: bool = False
    note: str = ""

    @property
    def reached(self) -> bool | None:
        """Whether the aim was reached; None without one."""
        if self.aim is None:
            return None
        return self.value <= self.aim if self.most else self.value >= self.aim


def show(rows: Sequence[Row], to: Path | None) -> None:
    """Print the lines, and write them as JSON where asked to."""
    table = Table(title=f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for name in ("work", "measured", "to reach", "reached", "of what"):
        table.add_column(name, justify="right" if name in ("measured", "to reach") else "left")
    for row in rows:
        aim = "" if row.aim is None else f"{'at most' if row.most else 'at least'} {row.aim:g} {row.unit}"
        reached = {None: "", True: "yes", False: "no"}[row.reached]
        table.add_row(row.work, f"{row.value:.3g} {row.unit}", aim, reached, row.note)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    if to is not None:
        found = [asdict(row) | {"reached": row.reached} for row in rows]
        to.write_text(json.dumps({"load": os.getloadavg()[0], "rows": found}, indent=1) + "\n")


def seconds(work: Callable[[], object]) -> float:
    """How long it takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def child(code: str, *arguments: str, within: int = 1800) -> list[float]:
    """The numbers in the last line that Python code prints, run in a process of its own.

    Raises:
        SystemExit: it failed.
    """
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=within,
        cwd=Path(__file__).parent.parent,
    )
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
    return [float(word) for word in done.stdout.strip().splitlines()[-1].split()]
