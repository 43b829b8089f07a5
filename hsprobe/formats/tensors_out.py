"""Write a dump or a trace as safetensors, a file a sample; finished files are kept when it is run again.

Each holds `input_ids` [S] int64 and, as far as they were recorded, `aux`, `final`, `layer/003` and so on:
row i belongs to token i, or to token i + `<name>.start`. What is known of depths stands in the metadata of
the file. Letters: S tokens of a sample, n rows, W width.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hsprobe.errors import HsprobeError
from hsprobe.formats.containers import tensors
from hsprobe.formats.convert import Outcome, Told
from hsprobe.formats.dump import Dump
from hsprobe.formats.stored import Array, Ints
from hsprobe.trace.reader import Rank, Trace
from hsprobe.trace.schema import RowStatus
from hsprobe.trace.tensor import Tensor

_COMMITTED = (int(RowStatus.PLAIN), int(RowStatus.ACCEPTED))
_PARTIAL = ".partial"


@dataclass(frozen=True)
class _Block:
    """Consecutive rows of a tensor. bits: [n, W]. start: the token that the first belongs to."""

    name: str
    dtype: str
    bits: Array
    start: int


def from_dump(dump: Dump, folder: Path, told: Told | None = None) -> Outcome:
    """Write the samples of a dump into a folder.

    Raises:
        HsprobeError: nothing can be read, or the folder cannot be written.
    """
    outcome, total = Outcome(), sum(1 for _ in dump.reader.names())
    about = _about_dump(dump)
    for done, name in enumerate(dump.reader.names(), start=1):
        path = folder / f"{_file_name(name)}.safetensors"
        outcome.kept += path.exists()
        if not path.exists():
            sample = dump.sample(name)
            if sample is None:
                continue
            try:
                blocks = [
                    _Block(_final_name(dump, rows.name), rows.dtype, rows.read(), rows.start)
                    for rows in sample.rows
                ]
            except HsprobeError as error:
                dump.skip(name, error)
                continue
            _write(path, sample.tokens, sample.loss_mask, blocks, about)
            outcome.rows += max((len(block.bits) for block in blocks), default=0)
        outcome.samples += 1
        if told is not None:
            told(done, total)
    outcome.skipped = dump.skipped
    if not outcome.samples:
        reason = f"; the first: {dump.skipped[0][1]}" if dump.skipped else "."
        raise HsprobeError(f"No sample of {dump.path} can be read{reason}", "Fetch a sound copy of the dump.")
    return outcome


def _final_name(dump: Dump, name: str) -> str:
    """A last state from before the norm must not be taken for one from after it."""
    final = dump.layout.final
    return "final_prenorm" if name == "final" and final is not None and final.norm == "pre" else name


def _about_dump(dump: Dump) -> dict[str, Any]:
    about: dict[str, Any] = {"producer": dump.key, "model": dict(dump.layout.model)}
    aux = dump.layout.aux
    if aux is not None and aux.count:
        about["chunks"] = aux.count
        depths = [d for d in aux.depths or () if isinstance(d, int)]
        if len(depths) == aux.count:
            about["depths"] = depths
    return about


def from_trace(trace: Trace, folder: Path, told: Told | None = None) -> Outcome:
    """Write the requests of a trace into a folder: of each token the first row that was committed.

    Raises:
        HsprobeError: the trace is damaged or holds nothing, or the folder cannot be written.
    """
    outcome = Outcome()
    about = _about_trace(trace)
    for request, name in enumerate(trace.requests.ids):
        path = folder / f"{_file_name(name)}.safetensors"
        outcome.kept += path.exists()
        if not path.exists():
            blocks = [block for rank in trace.ranks for block in _blocks(rank, request)]
            _write(path, trace.requests.tokens(request), None, _once(blocks), about)
            outcome.rows += max((len(block.bits) for block in blocks), default=0)
        outcome.samples += 1
        if told is not None:
            told(request + 1, len(trace.requests))
    if not outcome.samples:
        raise HsprobeError(f"{trace.path} holds no requests.", "Capture with prompts, and convert again.")
    return outcome


def _about_trace(trace: Trace) -> dict[str, Any]:
    model = trace.provenance.get("model")
    about: dict[str, Any] = {
        "producer": str(trace.provenance.get("producer")),
        "model": model if isinstance(model, dict) else {},
    }
    for rank in trace.ranks:
        if "aux" in rank.tensors:
            about["chunks"] = rank.tensors["aux"].chunks or 1
            if rank.tensors["aux"].depths:
                about["depths"] = rank.tensors["aux"].depths
    return about


def _blocks(rank: Rank, request: int) -> Iterator[_Block]:
    rows = np.flatnonzero(
        (rank.rows["request"] == request)
        & np.isin(rank.rows["status"], _COMMITTED)
        & (rank.passes["model"][rank.rows["pass"]] == 0)
    )
    for tensor in rank.tensors.values():
        at = np.flatnonzero(np.isin(tensor.row_index, rows))
        position, first = np.unique(rank.rows["position"][tensor.row_index[at]], return_index=True)
        if len(position):
            # Of several runs, what a prefix cache left out lies between: the longest is kept.
            runs = np.split(np.arange(len(position)), np.flatnonzero(np.diff(position) > 1) + 1)
            run = max(runs, key=len)
            yield _Block(_name(tensor), tensor.dtype, tensor.read_raw(at[first[run]]), int(position[run[0]]))


def _name(tensor: Tensor) -> str:
    return "final" if tensor.depth == "final" else tensor.name


def _once(blocks: list[_Block]) -> list[_Block]:
    """Of replicas on several ranks, the first."""
    return list({block.name: block for block in reversed(blocks)}.values())


def _write(
    path: Path, tokens: Ints | None, loss_mask: Ints | None, blocks: list[_Block], about: dict[str, Any]
) -> None:
    found: dict[str, tuple[str, Array]] = {}
    for name, values in (("input_ids", tokens), ("loss_mask", loss_mask)):
        if values is not None:
            found[name] = ("int64", values)
    for block in blocks:
        found[block.name] = (block.dtype, block.bits)
        if block.start:
            found[f"{block.name}.start"] = ("int64", np.array([block.start], np.int64))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + _PARTIAL)
        with partial.open("wb") as file:
            tensors.write(file, found, {"hsprobe": json.dumps(about)})
        partial.replace(path)
    except (OSError, ValueError) as error:
        raise HsprobeError(
            f"{path} cannot be written: {error}.", "Check that the folder has room."
        ) from error


def _file_name(name: str) -> str:
    """A path inside the folder for any name of a sample or request."""
    parts = [re.sub(r"[^\w.#:=+-]", "_", part) for part in name.split("/")]
    return "/".join(part for part in parts if part.strip(".")) or "sample"
