"""Write samples of a dump into a trace, block by block.

Letters: S tokens of a sample, n rows of a block, W width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from hsprobe.formats.dump import UNKNOWN, Dump, Layout, Rows, Sample
from hsprobe.formats.stored import Array, Ints, damaged
from hsprobe.trace import schema
from hsprobe.trace.context import context_hashes
from hsprobe.trace.schema import CaptureMode, Model, Phase, RowStatus
from hsprobe.trace.writer import TraceWriter

_BLOCK_BYTES = 8 << 20


def provenance(dump: Dump, samples: int | None) -> dict[str, Any]:
    """What a trace made of a dump says of its origin: `dump` holds the conventions and how sure they are."""
    layout = dump.layout
    about: dict[str, Any] = {"path": str(dump.path), "format": dump.name, "samples": samples}
    model = {key: value for key, value in layout.model.items() if value is not None}
    if layout.hidden:
        model.setdefault("hidden_size", layout.hidden)
    if layout.aux is not None:
        about["layers"] = {
            "setting": layout.aux.numbering.setting,
            "offset": layout.aux.numbering.offset,
            "sure": layout.aux.sure.value,
            "default": default_depths(layout, model.get("num_layers")),
        }
    if layout.final is not None:
        about["final"] = {"norm": layout.final.norm, "sure": layout.final.sure.value}
    about |= {"shift": layout.shift, "padding": layout.padding, "notes": list(layout.notes)}
    return {"producer": dump.key, "model": model, "dump": about}


def default_depths(layout: Layout, num_layers: object) -> list[int] | None:
    """What the producer captures when it is not told, None where that is not known."""
    if layout.aux is None or layout.aux.default is None or not isinstance(num_layers, int) or num_layers < 1:
        return None
    return list(layout.aux.default(num_layers))


class Sink:
    """Appends samples to a trace that is being written.

    Args:
        layout: the conventions that the tensors are labelled by.
        num_layers: L; without it a last state from before the final norm cannot be labelled, and is left out.
        hidden: H, where the dump does not tell it.
        known: name -> (width, dtype) of tensors that earlier samples had; samples that differ are refused.
        final_is_fed: the last state is what the draft is fed, as in EAGLE-1 and 2, and so its one chunk.
    """

    def __init__(
        self,
        writer: TraceWriter,
        layout: Layout,
        num_layers: int | None = None,
        hidden: int | None = None,
        *,
        known: dict[str, tuple[int, str]] | None = None,
        final_is_fed: bool = False,
    ) -> None:
        self.writer = writer
        self.layout = layout
        self.num_layers = num_layers
        self.hidden = layout.hidden or hidden
        self.final_is_fed = final_is_fed
        self.left_out: set[str] = set()
        self.rows = self.bytes = 0
        self._ids: list[str] = []
        self._tokens: list[Ints] = []
        self._known = {} if known is None else known
        writer.add_rank(0, {})

    def add(self, sample: Sample) -> None:
        """Append one sample.

        Raises:
            HsprobeError: it is not made as the samples before it, or is damaged where it is read.
        """
        named = [(rows, *self._label(rows)) for rows in sample.rows]
        for rows, name, _ in named:
            known = self._known.setdefault(name, (rows.width, rows.dtype))
            if known != (rows.width, rows.dtype):
                raise damaged(
                    sample.name,
                    f"its {rows.name} is {rows.width:,} wide in {rows.dtype}, "
                    f"that of the samples before it {known[0]:,} in {known[1]}",
                )
        blocks = {id(rows): _Whole(rows) for rows, _, _ in named}
        for phase in sorted({rows.phase for rows, _, _ in named}):
            self._add_phase(sample, phase, [one for one in named if one[0].phase == phase], blocks)
        self._ids.append(sample.name)
        self._tokens.append(np.zeros(0, np.int64) if sample.tokens is None else sample.tokens)

    @property
    def samples(self) -> int:
        """How many were added."""
        return len(self._ids)

    def finish(self) -> None:
        """Name the requests. The writer is left open."""
        self.writer.set_requests(self._ids, self._tokens, [len(tokens) for tokens in self._tokens])

    def _add_phase(
        self,
        sample: Sample,
        phase: Phase,
        named: list[tuple[Rows, str, dict[str, Any]]],
        blocks: dict[int, _Whole],
    ) -> None:
        low = min(rows.start for rows, _, _ in named)
        high = max(rows.start + rows.count for rows, _, _ in named)
        first = self._append_rows(sample, phase, low, high)
        self.rows += high - low
        for rows, name, attributes in named:
            if name in self.left_out:
                continue
            for at, block in blocks[id(rows)].pieces():
                index = np.arange(len(block), dtype=np.int64) + first + rows.start - low + at
                self.bytes += block.nbytes
                self.writer.append(0, name, block, index, dtype=rows.dtype, **attributes)

    def _append_rows(self, sample: Sample, phase: Phase, low: int, high: int) -> int:
        number = self.writer.add_passes(
            0,
            {
                "id": [len(self._ids)],
                "model": [int(Model.TARGET)],
                "phase": [int(phase)],
                "mode": [int(CaptureMode.FULL)],
                "n_rows": [high - low],
                "time": [0.0],
            },
        )
        count = high - low
        tokens, contexts = _labels(sample.tokens, low, high)
        return self.writer.append_rows(
            0,
            {
                "pass": np.full(count, number),
                "request": np.full(count, len(self._ids)),
                "position": np.arange(low, high),
                "token": tokens,
                "context": contexts,
                "status": np.full(count, int(RowStatus.PLAIN)),
            },
        )

    def _label(self, rows: Rows) -> tuple[str, dict[str, Any]]:
        """Name and attributes of a tensor in the trace."""
        if rows.name == "aux":
            return "aux", self._aux(rows.width)
        if rows.name == "final":
            final = self.layout.final
            if self.final_is_fed:
                depth = self.num_layers if final is not None and final.norm == "pre" else schema.DEPTH_FINAL
                return "aux", {"site": "aux", "chunks": 1, "depth": depth}
            if final is not None and final.norm == "pre":
                if self.num_layers is None:
                    self.left_out.add("final")
                    return "final", {"site": "final"}
                return f"layer/{self.num_layers:03d}", {"site": "layer", "depth": self.num_layers}
            return "final", {"site": "final", "depth": schema.DEPTH_FINAL}
        site, _, depth = rows.name.partition("/")
        return rows.name, {"site": site, "depth": int(depth) if depth.isdecimal() else None}

    def _aux(self, width: int) -> dict[str, Any]:
        aux = self.layout.aux
        count = aux.count if aux is not None else 0
        if not count and self.hidden and width % self.hidden == 0:
            count = width // self.hidden
        depths = [d for d in (aux.depths if aux is not None else None) or () if isinstance(d, int)]
        known = count > 0 and width % count == 0
        return {
            "site": "aux",
            "chunks": count if known else None,
            "depths": depths if known and len(depths) == count else None,
        }


class _Whole:
    """A tensor of one sample, read before anything of it is written, or in blocks where it is large."""

    def __init__(self, rows: Rows) -> None:
        each = max(1, rows.width * np.dtype(schema.STORAGE[rows.dtype]).itemsize)
        self._rows, self._step = rows, max(1, _BLOCK_BYTES // each)
        # A damaged sample should leave nothing behind; only a large one is read twice for that.
        self._kept = rows.read() if rows.count <= self._step else None
        if self._kept is None:
            for _ in self.pieces():
                pass

    def pieces(self) -> Iterator[tuple[int, Array]]:
        """(first row, rows) block by block."""
        if self._kept is not None:
            yield 0, self._kept
            return
        for at in range(0, self._rows.count, self._step):
            yield at, self._rows.read(at, at + self._step)


def _labels(tokens: Ints | None, low: int, high: int) -> tuple[Ints, Any]:
    """Token ids and contexts of rows low..high; no context from the first id on that is not known."""
    ids = np.full(high - low, UNKNOWN, np.int64)
    contexts = np.zeros(high - low, np.uint64)
    if tokens is not None:
        ids[: max(0, len(tokens) - low)] = tokens[low:high]
        lost = np.flatnonzero(tokens < 0)
        known = int(lost[0]) if len(lost) else len(tokens)
        hashes = np.array(context_hashes(tokens[:known].tolist()), np.uint64)[low:high]
        contexts[: len(hashes)] = hashes
    return ids, contexts
