"""What `hsprobe watch` shows: a screen that is drawn anew, or a line at a time where there is no terminal."""

from __future__ import annotations

import math

from rich.console import Group, RenderableType
from rich.text import Text

from hsprobe.capture.watch import Site, Tally
from hsprobe.diagnose.naming import plural
from hsprobe.diagnose.wording import figure
from hsprobe.report.terminal import new_table

_MOST_SITES = 40


def line(tally: Tally) -> str:
    """The figures in one line, with the site that is furthest from the training dump."""
    passes = sum(tally.passes.values())
    parts = [
        f"{passes:,} pass{'' if passes == 1 else 'es'}",
        plural(sum(tally.rows.values()), "row"),
        plural(len(tally.requests), "request"),
        f"{tally.size / 1e6:.1f} MB",
    ]
    if tally.acceptance is not None:
        parts.append(f"acceptance {tally.acceptance:.2f}")
    compared = {name: site for name, site in tally.sites.items() if site.errors.finite}
    if compared:
        worst = max(compared, key=lambda name: compared[name].errors.median)
        parts.append(f"largest median error {figure(compared[worst].errors.median)} at {worst}")
    if tally.gaps:
        parts.append(plural(sum(tally.gaps.values()), "gap"))
    return ", ".join(parts)


def screen(tally: Tally, *, compared: bool) -> RenderableType:
    """Everything; `compared` says whether there is a training dump to compare with."""
    if not tally.spools:
        return Text("no spool yet: the server has recorded nothing")
    passes = new_table(("model", "l"), ("phase", "l"), ("passes", "r"), ("rows", "r"))
    for (model, phase), count in sorted(tally.passes.items()):
        passes.add_row(model, phase, f"{count:,}", f"{tally.rows[model, phase]:,}")
    columns = [("site", "l"), ("rows", "r")]
    if compared:
        columns += [("compared", "r"), ("median error", "r"), ("largest", "r"), ("not finite", "r")]
    sites = new_table(*columns)
    for name in list(tally.sites)[:_MOST_SITES]:
        sites.add_row(name, *_cells(tally.sites[name], compared))
    head = Text(line(tally), style="bold")
    gaps = [Text(f"gap ({count}): {reason}", style="yellow") for reason, count in tally.gaps.most_common(5)]
    return Group(head, Text(""), passes, Text(""), sites, *gaps)


def _cells(site: Site, compared: bool) -> list[str]:
    cells = [f"{site.rows:,}"]
    if compared:
        errors = site.errors
        largest = errors.largest if errors.finite else math.nan
        cells += [f"{errors.rows:,}", figure(errors.median), figure(largest), f"{errors.nonfinite:,}"]
    return cells
