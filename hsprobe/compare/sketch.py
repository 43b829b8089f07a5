"""Small stand-ins for the chunks of a trace: a random projection of every row, to tell later what changed.

A chunk's rows are divided by the robust magnitude of each channel and multiplied by a matrix of random signs.
That keeps distances: the relative error of two rows shows in their projections, within a factor of about two
for one row and a few per cent for the median of many. See `docs/ci.md` for what that can detect and what not.

Shapes: n rows, H channels, M entries of a projection.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsprobe.compare.stack import Stack, spread, stacks_of
from hsprobe.compare.statistics import Floats, channel_scale
from hsprobe.errors import HsprobeError
from hsprobe.remote.location import Location
from hsprobe.trace.reader import Trace

FORMAT, VERSION = "hsprobe-sketch", 1
ENTRIES = 16
ROWS = 256
_SCALE_ROWS = 256


@dataclass(frozen=True)
class Piece:
    """The sketch of one chunk or depth.

    Attributes:
        name: `aux chunk 0`, `layer/003`. depth: what the producer says it is, None where it does not.
        scale: [H] float32, magnitude of each channel. rows: [n, M] float32, the projections.
    """

    name: str
    depth: int | str | None
    scale: Floats
    rows: Floats


@dataclass(frozen=True)
class Sketch:
    """The sketch of a trace.

    Attributes:
        facts: architecture, num_layers, dtype and ids of the draft's config, as far as known.
        context: [n] uint64, which row each one is, ascending. pieces: chunks first, in their order.
    """

    facts: dict[str, Any]
    context: NDArray[np.uint64]
    pieces: list[Piece]


def signs(width: int) -> Floats:
    """The same [H, M] matrix of random signs for everyone, so that rows have a mean square of their own."""
    bits = np.frombuffer(hashlib.shake_256(b"hsprobe sketch 1").digest((width * ENTRIES + 7) // 8), np.uint8)
    found = np.unpackbits(bits)[: width * ENTRIES].reshape(width, ENTRIES).astype(np.float32)
    matrix: Floats = (2 * found - 1) / np.float32(np.sqrt(ENTRIES))
    return matrix


def sketch(path: Location | str) -> Sketch:
    """Sketch the chunks of a trace, or where it has none its depths, on an even sample of rows.

    Raises:
        HsprobeError: the trace cannot be read, or holds neither chunks nor depths.
    """
    with Trace.open(path) as trace:
        found = lanes(trace)
        keys = found[0].stack.keys
        context = np.sort(keys.context[spread(np.sort(keys.by_context[1]), keys, ROWS)])
        chosen = [part for part in found if part.chunk] or found
        return Sketch(_facts(trace), context, [_piece(part, context) for part in chosen])


@dataclass(frozen=True)
class Part:
    """A chunk or a depth of a trace: the `columns` of a stack."""

    name: str
    depth: int | str | None
    stack: Stack
    columns: slice
    chunk: bool

    def at(self, context: NDArray[np.uint64]) -> tuple[Floats, NDArray[np.bool_]]:
        """Rows [n, H] with these contexts, and a mask of those that are there; the others are zero."""
        table, first = self.stack.keys.by_context
        at = np.minimum(np.searchsorted(table, context), len(table) - 1)
        there: NDArray[np.bool_] = table[at] == context
        rows = np.zeros((len(context), self.columns.stop - self.columns.start), np.float32)
        rows[there] = self.stack.read(first[at[there]])[:, self.columns]
        return rows, there


def lanes(trace: Trace) -> list[Part]:
    """Chunks of aux (or of draft.input), then depths; at least one.

    Raises:
        HsprobeError: there are none.
    """
    stacks = {name: s for name, s in stacks_of(trace, "infer").items() if len(s.keys.usable)}
    found = []
    chunked = stacks.get("aux") or stacks.get("draft.input")
    if chunked is not None:
        depths = chunked.tensor.depths or []
        count = chunked.tensor.chunks or len(depths) or 1
        width = chunked.width // count
        for k in range(count):
            depth = depths[k] if k < len(depths) else None
            name = f"{chunked.name} chunk {k}"
            found.append(Part(name, depth, chunked, slice(k * width, (k + 1) * width), True))
    for name, stack in stacks.items():
        if stack.tensor.site == "layer" or name in ("final", "logits_processor.input"):
            found.append(Part(name, stack.depth, stack, slice(0, stack.width), False))
    if not found:
        raise HsprobeError(f"{trace.path} holds no states.", "Capture with '--sites aux,layer'.")
    return found


def _piece(part: Part, context: NDArray[np.uint64]) -> Piece:
    sample = part.stack.read(spread(part.stack.keys.usable, part.stack.keys, _SCALE_ROWS))[:, part.columns]
    # Kept in half the space, and used as it is kept, so that both sides divide by the same.
    scale = np.clip(channel_scale(sample), 1e-6, 6e4).astype(np.float16).astype(np.float32)
    rows, there = part.at(context)
    return Piece(part.name, part.depth, scale, np.where(there[:, None], project(rows, scale), np.nan))


def project(rows_nH: Floats, scale_H: Floats) -> Floats:
    """[n, H] -> [n, M], of rows with a mean square of 1 in every channel about unit length."""
    with np.errstate(over="ignore", invalid="ignore"):
        unit_nH = rows_nH / scale_H / np.float32(np.sqrt(len(scale_H)))
        found: Floats = (unit_nH @ signs(len(scale_H))).astype(np.float32)
    return found


def _facts(trace: Trace) -> dict[str, Any]:
    model = trace.provenance.get("model")
    draft = trace.provenance.get("draft")
    model = model if isinstance(model, dict) else {}
    return {
        **{key: model.get(key) for key in ("architecture", "num_layers", "hidden_size", "dtype")},
        "aux_layer_ids": draft.get("aux_layer_ids") if isinstance(draft, dict) else None,
    }


def save(found: Sketch, path: Path) -> None:
    """Write a sketch as an .npz file with the same bytes for the same sketch."""
    head = {
        "format": FORMAT,
        "version": VERSION,
        "facts": found.facts,
        "pieces": [{"name": p.name, "depth": p.depth} for p in found.pieces],
    }
    arrays: dict[str, NDArray[Any]] = {
        "head": np.frombuffer(json.dumps(head, sort_keys=True).encode(), np.uint8),
        "context": found.context,
        "scale": np.stack([p.scale.astype(np.float16) for p in found.pieces]),
        "rows": np.stack([p.rows for p in found.pieces]),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            buffer = io.BytesIO()
            np.save(buffer, array, allow_pickle=False)
            # Without a date of its own, an unchanged baseline is an unchanged file.
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), buffer.getvalue(), zipfile.ZIP_DEFLATED)


def load(path: Path) -> Sketch:
    """Read a sketch.

    Raises:
        HsprobeError: there is none, or the file is none.
    """
    again = "Write it again with --hsprobe-update."
    try:
        with np.load(path, allow_pickle=False) as archive:
            head = json.loads(archive["head"].tobytes())
            context, scale, rows = (archive[name] for name in ("context", "scale", "rows"))
    except FileNotFoundError:
        raise HsprobeError(f"There is no baseline {path}.", again) from None
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise HsprobeError(f"{path} is not a baseline of hsprobe ({error}).", again) from None
    if head.get("format") != FORMAT or head.get("version") != VERSION:
        raise HsprobeError(f"{path} is a baseline of another version.", again)
    if not len(scale) == len(rows) == len(head["pieces"]) or rows.shape[1:] != (len(context), ENTRIES):
        raise HsprobeError(f"{path} is damaged: its arrays do not fit together.", again)
    pieces = [
        Piece(entry["name"], entry["depth"], s.astype(np.float32), r)
        for entry, s, r in zip(head["pieces"], scale, rows, strict=True)
    ]
    return Sketch(head["facts"], context, pieces)


def distances(a: Floats, b: Floats) -> Floats:
    """Estimated row errors of two blocks of projections, as `row_errors` defines them. [n, M] -> [n]."""
    with np.errstate(invalid="ignore", divide="ignore"):
        size = np.maximum(np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1))
        gap = np.linalg.norm(a - b, axis=1)
        found: Floats = np.where(size > 0, gap / size, gap).astype(np.float32)
    return found
