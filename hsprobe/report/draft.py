"""The draft's stages, for people."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from hsprobe.diagnose.draft.model import DraftFindings, StageLine
from hsprobe.diagnose.naming import plural
from hsprobe.diagnose.wording import figure


def clear(found: DraftFindings | None) -> list[str]:
    """One line for a draft that computes what its checkpoint says."""
    if found is None:
        return []
    if not found.stages:
        return ["no stage of the draft was captured"]
    worst = max(found.stages, key=_strain)
    return [
        f"the draft computes what its checkpoint says in {plural(len(found.stages), 'stage')}",
        f"nearest to its noise: {worst.site}, error {figure(worst.error)}, noise {figure(worst.noise)}",
    ]


def tables(found: DraftFindings | None) -> list[RenderableType]:
    """Every stage, where one differs; a line where none does."""
    from hsprobe.report import terminal

    if found is None or not found.stages:
        return []
    if all(line.ok for line in found.stages):
        return [Text("; ".join(clear(found)))]
    table = terminal.new_table(
        ("draft stage", "l"), ("error", "r"), ("noise", "r"), ("differ", "r"), ("by phase", "l"), ("", "l")
    )
    for line in found.stages:
        phases = "" if line.ok else ", ".join(f"{phase} {figure(e)}" for phase, e in line.phases.items())
        table.add_row(
            line.site,
            Text(figure(line.error), style="" if line.ok else "bold red"),
            figure(line.noise),
            f"{line.over:,}/{line.rows:,}",
            phases.replace("draft ", ""),
            Text("ok" if line.ok else "!", style="bold green" if line.ok else "bold red"),
        )
    return [Group(Text(f"the draft against {found.draft}", style="dim"), table)]


def _strain(line: StageLine) -> float:
    return line.error / line.noise if line.error == line.error else -1.0
