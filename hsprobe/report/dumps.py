"""What is in a training dump, in one screen."""

from __future__ import annotations

from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.text import Text

from hsprobe.diagnose.naming import plural
from hsprobe.formats.dump import DEPTHS, Dump, Sample
from hsprobe.report.terminal import new_table, printed

SCHEMA_VERSION = 1
_LOOKED_AT = 8


def facts(dump: Dump) -> dict[str, Any]:
    """Everything shown, as plain data; a few samples are opened for it."""
    names = list(dump.reader.names())
    looked = [sample for name in names[:_LOOKED_AT] if (sample := dump.sample(name)) is not None]
    layout = dump.layout
    aux, final = layout.aux, layout.final
    return {
        "schema_version": SCHEMA_VERSION,
        "path": str(dump.path),
        "format": dump.key,
        "format_name": dump.name,
        "samples": len(names),
        "model": dict(layout.model),
        "hidden_size": layout.hidden,
        "aux": None
        if aux is None
        else {
            "chunks": aux.count or None,
            "setting": aux.numbering.setting,
            "depth_minus_id": aux.numbering.offset,
            "depths": None if aux.depths is None else list(aux.depths),
            "sure": aux.sure.value,
        },
        "final": None if final is None else {"norm": final.norm, "sure": final.sure.value},
        "shift": layout.shift,
        "padding": layout.padding,
        "notes": list(layout.notes),
        "looked_at": {
            "samples": [sample.name for sample in looked],
            "tokens": sum(len(s.tokens) for s in looked if s.tokens is not None),
            "padded": sum(sample.padded for sample in looked),
            "with_token_ids": all(sample.tokens is not None for sample in looked),
        },
        "tensors": _tensors(looked),
        "unreadable": [{"sample": name, "reason": why} for name, why in dump.skipped],
        "not_followed": [{"file": name, "reason": why} for name, why in dump.source.unread],
    }


def _tensors(samples: list[Sample]) -> list[dict[str, Any]]:
    found: dict[tuple[str, str, int], int] = {}
    for sample in samples:
        for rows in sample.rows:
            key = (rows.name, rows.dtype, rows.width)
            found[key] = found.get(key, 0) + rows.count
    return [{"name": n, "dtype": d, "width": w, "rows": count} for (n, d, w), count in found.items()]


def write(known: dict[str, Any], stream: TextIO) -> None:
    """Write the facts for people."""
    console = Console(file=stream, highlight=False, emoji=False, markup=False)
    stream.write(printed(Group(_head(known), Text(""), _table(known), *_tail(known)), console))


def _head(known: dict[str, Any]) -> RenderableType:
    from rich.table import Table

    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    looked = known["looked_at"]
    grid.add_row("dump", f"{known['path']}, {known['format_name']}")
    more = f", {plural(looked['tokens'], 'token')}" if looked["with_token_ids"] else ", without token ids"
    padded = f", {plural(looked['padded'], 'row')} of padding" if looked["padded"] else ""
    grid.add_row("samples", f"{known['samples']:,} ({len(looked['samples'])} looked at{more}{padded})")
    grid.add_row("model", _model(known))
    if known["aux"]:
        grid.add_row("chunks", _chunks(known["aux"]))
    if known["final"]:
        side = {"pre": "before the final norm", "post": "after the final norm", None: "the last one"}
        norm, sure = known["final"]["norm"], known["final"]["sure"]
        grid.add_row(
            "last state", f"{side[norm]} ({sure})" if norm else f"before or after the final norm: {sure}"
        )
    if known["shift"]:
        grid.add_row("shift", f"token ids are stored {known['shift']} to the left of the rows; undone here")
    if known["padding"]:
        grid.add_row("padding", known["padding"])
    return grid


def _model(known: dict[str, Any]) -> str:
    model = known["model"]
    name = model.get("architecture") or model.get("path") or "not recorded"
    layers = f"{model['num_layers']} layers of " if model.get("num_layers") else "hidden size "
    return f"{name}, {layers}{known['hidden_size'] or '?'}"


def _chunks(aux: dict[str, Any]) -> str:
    count = "of a number not recorded" if aux["chunks"] is None else str(aux["chunks"])
    own = aux["setting"] != DEPTHS
    if aux["depths"] is None:
        convention = "the output" if aux["depth_minus_id"] == 1 else "the input"
        how = f" ({aux['setting']}, where an id names {convention} of its layer)" if own else ""
        return f"{count}; layers {aux['sure']}{how}"
    ids = [d - aux["depth_minus_id"] if isinstance(d, int) else d for d in aux["depths"]]
    numbered = f", {aux['setting']} {ids}" if own else ""
    return f"{count}; depths {', '.join(map(str, aux['depths']))}{numbered} ({aux['sure']})"


def _table(known: dict[str, Any]) -> RenderableType:
    table = new_table(("tensor", "l"), ("dtype", "l"), ("width", "r"), ("rows looked at", "r"))
    for line in known["tensors"]:
        table.add_row(line["name"], line["dtype"], f"{line['width']:,}", f"{line['rows']:,}")
    return table


def _tail(known: dict[str, Any]) -> list[RenderableType]:
    lines: list[RenderableType] = [Text(f"note  {note}") for note in known["notes"]]
    for one in known["unreadable"]:
        lines.append(Text(str(one["reason"]), style="yellow"))
    if known["not_followed"]:
        first = known["not_followed"][0]
        left = plural(len(known["not_followed"]), "file")
        lines.append(Text(f"{left} left out; {first['file']}: {first['reason']}", style="yellow"))
    return [Text(""), *lines] if lines else []
