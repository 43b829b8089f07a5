"""How many training rows were compared, and why the others were not."""

from __future__ import annotations

from rich.text import Text

from hsprobe.compare.coverage import Coverage, Drift
from hsprobe.diagnose.naming import plural


def lines(coverage: Coverage) -> list[Text]:
    """The figures, which add up to the rows of TRAIN; a reason a line; token ids where they part."""
    total = (
        f"{coverage.matched:,}/{coverage.train_rows:,} training rows compared "
        f"({coverage.matched_requests}/{coverage.train_requests} requests)"
    )
    found = [Text(f"{total}{_sum(coverage)}")]
    if coverage.reasons:
        found.append(Text("without a partner:"))
        found += [Text(f"  {count:>7,}  {reason}") for reason, count in coverage.reasons.items()]
    for drift in coverage.drifts:
        found += _drift(drift)
    return found


def _sum(coverage: Coverage) -> str:
    """`; TRAIN holds 951 rows: 14 repeat another row's tokens`; empty where nothing needs explaining."""
    parts = []
    if coverage.repeats:
        parts.append(f"{coverage.repeats:,} repeat another row's tokens")
    parts += [f"{count:,} {name}" for name, count in coverage.left_out_train.items()]
    return f"; TRAIN holds {plural(coverage.recorded, 'row')}: {', '.join(parts)}" if parts else ""


def _drift(drift: Drift) -> list[Text]:
    """The ids around the first that differs, one above the other."""
    width = max((len(str(i)) for i in (*drift.train_ids, *drift.infer_ids)), default=1)
    at = drift.position - drift.start
    head = (
        f"request {drift.train_request}: token ids differ from position {drift.position} on "
        f"(request {drift.infer_request} in INFER); from {drift.start}:"
    )
    rows = []
    for name, ids in (("TRAIN", drift.train_ids), ("INFER", drift.infer_ids)):
        text = Text(f"  {name} ")
        for number, token in enumerate(ids):
            text.append(" ")
            text.append(f"{token:>{width}}", style="bold red" if number == at else "")
        rows.append(text if at < len(ids) else text.append(" (ends)"))
    rows.append(Text(f"        {' ' * ((width + 1) * at)}{'^' * width}"))
    return [Text(head), *rows]
