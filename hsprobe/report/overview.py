"""What is in a trace, in one screen."""

from __future__ import annotations

from collections import Counter
from typing import Any, TextIO

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from hsprobe.diagnose.naming import listed, phase_name, plural, short
from hsprobe.report.terminal import printed
from hsprobe.trace.reader import Trace
from hsprobe.trace.schema import CaptureMode, Model, RowStatus

SCHEMA_VERSION = 1
_MOST_GAPS = 5


def facts(trace: Trace) -> dict[str, Any]:
    """Everything shown, as plain data."""
    requests = trace.requests
    lengths = [len(requests.tokens(r)) for r in range(len(requests.ids))]
    return {
        "schema_version": SCHEMA_VERSION,
        "path": str(trace.path),
        "created": trace.created,
        "state": trace.state,
        "provenance": trace.provenance,
        "requests": {
            "count": len(lengths),
            "prompt_tokens": int(requests.prompt_len.sum()),
            "tokens": sum(lengths),
        },
        "ranks": [{"index": rank.index, **rank.coords} for rank in trace.ranks],
        "passes": _passes(trace),
        "rows": _rows(trace),
        "tensors": _tensors(trace),
        "gaps": trace.gaps,
    }


def _passes(trace: Trace) -> list[dict[str, Any]]:
    counts: Counter[tuple[int, int, int]] = Counter()
    rows: Counter[tuple[int, int, int]] = Counter()
    for rank in trace.ranks:
        columns = (rank.passes[name].tolist() for name in ("model", "phase", "mode", "n_rows"))
        for model, phase, mode, n in zip(*columns, strict=True):
            counts[model, phase, mode] += 1
            rows[model, phase, mode] += n
    return [
        {
            "model": Model(key[0]).name.lower(),
            "phase": phase_name(key[1]),
            "mode": CaptureMode(key[2]).name,
            "passes": counts[key],
            "rows": rows[key],
        }
        for key in sorted(counts)
    ]


def _rows(trace: Trace) -> dict[str, int]:
    counts: Counter[int] = Counter()
    for rank in trace.ranks:
        values, numbers = np.unique(rank.rows["status"], return_counts=True)
        counts.update(dict(zip(values.tolist(), numbers.tolist(), strict=True)))
    return {RowStatus(status).name.lower(): counts[status] for status in sorted(counts)}


def _tensors(trace: Trace) -> list[dict[str, Any]]:
    found = []
    for name in sorted({name for rank in trace.ranks for name in rank.tensors}):
        tensors = [rank.tensors[name] for rank in trace.ranks if name in rank.tensors]
        first = tensors[0]
        found.append(
            {
                "name": name,
                "site": first.site,
                "depth": first.depth,
                "depths": first.depths,
                "chunks": first.chunks,
                "dtype": first.dtype,
                "width": int(first.shape[1]),
                "rows": sum(int(tensor.shape[0]) for tensor in tensors),
                "ranks": len(tensors),
            }
        )
    return found


def write(known: dict[str, Any], stream: TextIO) -> None:
    """Write the facts for people."""
    console = Console(file=stream, highlight=False, emoji=False, markup=False)
    parts = [_head(known), Text(""), _pass_table(known), Text(""), _tensor_table(known), *_tail(known)]
    stream.write(printed(Group(*parts), console))


def _head(known: dict[str, Any]) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    provenance = known["provenance"]
    producer = provenance.get("producer") or "unknown"
    version = provenance.get(f"{producer}_version")
    requests = known["requests"]
    grid.add_row("trace", f"{known['path']}, {known['state']}, made {known['created']}")
    grid.add_row("producer", f"{producer} {version or ''}".strip())
    grid.add_row("model", _model(provenance.get("model")))
    if provenance.get("draft"):
        grid.add_row("draft", _draft(provenance["draft"], provenance.get("aux")))
    if provenance.get("accept_length") is not None:
        grid.add_row("accept length", f"{provenance['accept_length']:.2f}")
    output = requests["tokens"] - requests["prompt_tokens"]
    grid.add_row(
        "requests",
        f"{requests['count']:,} ({plural(requests['prompt_tokens'], 'prompt token')}, "
        f"{plural(output, 'output token')})",
    )
    grid.add_row(
        "rows", ", ".join(f"{count:,} {status}" for status, count in known["rows"].items()) or "none"
    )
    if len(known["ranks"]) > 1:
        grid.add_row("ranks", str(len(known["ranks"])))
    if isinstance(provenance.get("self_test"), dict):
        grid.add_row("self-test", self_test(provenance["self_test"]))
    return grid


def self_test(shown: dict[str, Any]) -> str:
    """A line for the probes that were disarmed, that showed nothing, and that see what they say."""
    lines: dict[tuple[str, str], list[str]] = {}
    for site, one in sorted(shown.items()):
        if isinstance(one, dict):
            where = f" on rank {listed(one['ranks'])}" if isinstance(one.get("ranks"), list) else ""
            why = f": {one['why']}" if one.get("why") else ""
            lines.setdefault((f"{one.get('state')}{where}", why), []).append(site)
    ordered = sorted(lines.items(), key=lambda line: (line[0][0] == "proven", line[0]))
    return "\n".join(f"{state} {', '.join(sites)}{why}" for (state, why), sites in ordered)


def _model(model: object) -> str:
    if not isinstance(model, dict):
        return "not recorded"
    size = f"{model.get('num_layers', '?')} layers of {model.get('hidden_size', '?')}"
    name = model.get("architecture", "unknown")
    return f"{name}, {size}, {model.get('dtype', '?')} ({model.get('path', '?')})"


def _draft(draft: object, aux: object) -> str:
    if not isinstance(draft, dict):
        return "not recorded"
    ids = draft.get("aux_layer_ids")
    depths = aux.get("depths") if isinstance(aux, dict) else None
    return f"{draft.get('path', '?')}, aux layer ids {ids if ids is not None else 'not set'}" + (
        f", depths {listed(depths)}" if isinstance(depths, list) else ""
    )


def _table(*columns: tuple[str, str]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name, side in columns:
        table.add_column(name, justify="right" if side == "r" else "left", no_wrap=True)
    return table


def _pass_table(known: dict[str, Any]) -> RenderableType:
    if not known["passes"]:
        return Text("no passes were recorded")
    table = _table(("model", "l"), ("phase", "l"), ("mode", "l"), ("passes", "r"), ("rows", "r"))
    for line in known["passes"]:
        table.add_row(line["model"], line["phase"], line["mode"], f"{line['passes']:,}", f"{line['rows']:,}")
    return table


def _tensor_table(known: dict[str, Any]) -> RenderableType:
    if not known["tensors"]:
        return Text("no tensors were recorded")
    table = _table(("tensor", "l"), ("depth", "l"), ("dtype", "l"), ("width", "r"), ("rows", "r"))
    for line in _folded(known["tensors"]):
        depth = "-" if line["depth"] is None else short(line["depth"])
        if line["chunks"]:
            depths = listed(line["depths"]) if line["depths"] else "not declared"
            depth = f"{plural(line['chunks'], 'chunk')}: {depths}"
        table.add_row(
            line["name"], line.get("span", depth), line["dtype"], f"{line['width']:,}", f"{line['rows']:,}"
        )
    return table


def _folded(tensors: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs of tensors of a site that differ in depth alone become one line."""
    lines: list[dict[str, Any]] = []
    for tensor in tensors:
        last = lines[-1] if lines else None
        same = last is not None and all(
            last[key] == tensor[key] for key in ("site", "dtype", "width", "rows")
        )
        follows = (
            last is not None and isinstance(tensor["depth"], int) and last["last"] == tensor["depth"] - 1
        )
        if last is not None and tensor["site"] in ("layer", "mid") and same and follows:
            last["last"] = tensor["depth"]
            last["name"] = f"{last['first_name']}..{tensor['depth']:03d}"
            last["span"] = f"{last['depth']} to {tensor['depth']}"
        else:
            lines.append({**tensor, "first_name": tensor["name"], "last": tensor["depth"]})
    return lines


def _tail(known: dict[str, Any]) -> list[RenderableType]:
    gaps = known["gaps"]
    if not gaps:
        return []
    lines: list[RenderableType] = [Text(""), Text(plural(len(gaps), "gap"), style="yellow")]
    for gap in gaps[:_MOST_GAPS]:
        place = ", ".join(
            f"{key} {gap[key]}" for key in ("rank", "site", "depth", "pass") if gap.get(key) is not None
        )
        lines.append(Text(f"  {place}: {gap.get('reason', 'no reason given')}"))
    if len(gaps) > _MOST_GAPS:
        lines.append(Text(f"  and {len(gaps) - _MOST_GAPS:,} more"))
    return lines
