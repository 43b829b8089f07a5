"""Writes a trace file: rows, passes and tensors in, one HDF5 file out, exact bits, bounded memory.

Letters: n rows of an append, W width of a tensor.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import h5py
import numpy as np
import numpy.typing as npt

from hsprobe import __version__
from hsprobe.errors import HsprobeError
from hsprobe.trace import schema

Columns = Mapping[str, npt.ArrayLike]
Depth = int | Literal["final"]

_BLOCK_BYTES = 1 << 19
"""Aim for one HDF5 chunk of a tensor, and the most that is held back of a tensor before it is written."""
_MAX_BLOCK_ROWS = 4096
_COLUMN_CHUNK = 1024
# The 1.10 format checksums metadata and marks a file whose writer died.
_LIBVER = ("v110", "v110")


@dataclass
class _Stream:
    """One tensor being written; rows are held until they fill a chunk, because a chunk is written whole."""

    group: h5py.Group
    attrs: dict[str, Any]
    column_chunk: int
    held: npt.NDArray[Any]
    held_index: npt.NDArray[np.int64]
    n_held: int = 0

    def put(self, data: npt.NDArray[Any], index: npt.NDArray[np.int64]) -> None:
        """Write as many whole blocks as there are, hold the rest."""
        block, done = len(self.held), 0
        while done < len(data):
            if not self.n_held and len(data) - done >= block:
                whole = done + (len(data) - done) // block * block
                self._write(data[done:whole], index[done:whole])
                done = whole
                continue
            take = min(block - self.n_held, len(data) - done)
            to, since = slice(self.n_held, self.n_held + take), slice(done, done + take)
            self.held[to], self.held_index[to] = data[since], index[since]
            self.n_held, done = self.n_held + take, done + take
            if self.n_held == block:
                self.drain()

    def drain(self) -> None:
        """Write what is held."""
        self._write(self.held[: self.n_held], self.held_index[: self.n_held])
        self.n_held = 0

    def _write(self, data: npt.NDArray[Any], index: npt.NDArray[np.int64]) -> None:
        if "data" not in self.group:
            self._create(len(data))
        _extend(self.group["data"], data)
        _extend(self.group["row"], index)

    def _create(self, n: int) -> None:
        # A chunk is stored whole, so a small trace gets small ones.
        rows, width = max(1, min(len(self.held), n)), self.held.shape[1]
        self.group.create_dataset(
            "data",
            shape=(0, width),
            maxshape=(None, width),
            dtype=self.held.dtype,
            chunks=(rows, self.column_chunk),
            fletcher32=True,
        )
        _column(self.group, "row", np.dtype("<i8"), min(_COLUMN_CHUNK, rows))
        for name, value in self.attrs.items():
            if isinstance(value, str):
                _set_text(self.group, name, value)
            else:
                self.group.attrs[name] = value


class TraceWriter:
    """Writes `<path>.partial` and renames it to `path` on close; an exception inside `with` leaves neither.

    Args:
        path: the trace to make; an older file there is replaced at the end, not before.
        provenance: anything JSON can hold, see `docs/trace-format.md` for the keys.

    Raises:
        HsprobeError: the file cannot be written (from any method).
        ValueError: an argument contradicts itself or what was written before (from any method).
    """

    def __init__(self, path: Path | str, provenance: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self.partial = self.path.with_name(self.path.name + schema.PARTIAL_SUFFIX)
        self._provenance = json.loads(json.dumps(dict(provenance)))
        self._gaps: list[dict[str, Any]] = []
        self._requests: tuple[list[str], list[npt.NDArray[np.int64]], list[int]] = ([], [], [])
        self._streams: dict[int, dict[str, _Stream]] = {}
        self._n_rows: dict[int, int] = {}
        self._finished: set[int] = set()
        with self._writing():
            self._file = h5py.File(self.partial, "w", libver=_LIBVER)
            _set_text(self._file, "format", schema.FORMAT)
            self._file.attrs["schema_version"] = schema.SCHEMA_VERSION
            _set_text(self._file, "state", schema.STATE_WRITING)
            _set_text(self._file, "created", datetime.now(UTC).isoformat(timespec="seconds"))
            _set_text(self._file, "hsprobe_version", __version__)
            self._file.create_group("ranks")
            self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort()
        elif self._file:
            self.close()

    def add_rank(self, index: int, coords: Mapping[str, int]) -> None:
        """Add a recording process.

        Args:
            coords: its place (`schema.COORDS`, 0 where absent), the sizes (`schema.SIZES`, 1 where absent),
                and the layers it runs (`schema.LAYERS`) where it says.
        """
        if index in self._streams:
            raise ValueError(f"rank {index} was added before")
        with self._writing():
            group = self._file["ranks"].create_group(str(index))
            for name in schema.COORDS:
                group.attrs[name] = int(coords.get(name, 0))
            for name in schema.SIZES:
                group.attrs[name] = int(coords.get(name, 1))
            for name in schema.LAYERS:
                if name in coords:
                    group.attrs[name] = int(coords[name])
            group.create_group("tensors")
            for table, columns in (("passes", schema.PASS_COLUMNS), ("rows", schema.ROW_COLUMNS)):
                for name, code in columns.items():
                    _column(group, f"{table}/{name}", np.dtype(code), _COLUMN_CHUNK)
        self._streams[index] = {}
        self._n_rows[index] = 0

    def add_passes(self, rank: int, columns: Columns) -> int:
        """Append passes as parallel columns (`schema.PASS_COLUMNS`); returns the index of the first."""
        return self._append_table(rank, "passes", schema.PASS_COLUMNS, columns)

    def append_rows(self, rank: int, columns: Columns) -> int:
        """Append rows as parallel columns (`schema.ROW_COLUMNS`); returns the index of the first."""
        first = self._append_table(rank, "rows", schema.ROW_COLUMNS, columns)
        self._n_rows[rank] = first + np.size(columns["pass"])
        return first

    def append(
        self,
        rank: int,
        name: str,
        data: npt.NDArray[Any],
        row_index: npt.ArrayLike,
        *,
        site: str,
        dtype: str,
        depth: Depth | None = None,
        depths: Sequence[int] | None = None,
        chunks: int | None = None,
        spread: str | None = None,
    ) -> None:
        """Append rows of a tensor, bit for bit.

        Args:
            rank: a rank that was added.
            name: name of the tensor, such as "layer/003".
            data: [n, W] bits in the storage type of `dtype` (`schema.STORAGE`: bfloat16 as uint16, ...).
            row_index: [n] index into the rows of this rank that were appended before.
            site: where the tensor was taken.
            dtype: real element type ("bfloat16", "float32", ...).
            depth: decoder layers applied, or "final" (after the final norm).
            depths: of a vector of several chunks: the depth of each chunk, in stored order, as declared.
            chunks: of a vector of several chunks: how many.
            spread: over which ranks the rows were spread when they were taken (`schema.SPREAD_ATTN_TP`).
        """
        if rank in self._finished:
            raise ValueError(f"rank {rank} is finished")
        index_n = np.asarray(row_index, dtype=np.int64)
        attrs = _attributes(site, dtype, depth, depths, chunks)
        _check_block(name, data, index_n, dtype, self._n_rows[rank])
        stream = self._stream(rank, name, data, attrs)
        with self._writing():
            # A site's rows may be spread in some passes and whole in others: one makes it worth knowing.
            if spread is not None and "spread" not in stream.group.attrs:
                _set_text(stream.group, "spread", spread)
            stream.put(data, index_n)

    def set_requests(
        self, ids: Sequence[str], tokens: Sequence[npt.ArrayLike], prompt_lens: Sequence[int]
    ) -> None:
        """Name the requests and give the token ids (prompt and output) and prompt length of each."""
        arrays = [np.asarray(request, dtype=np.int64).reshape(-1) for request in tokens]
        if not len(ids) == len(arrays) == len(prompt_lens):
            raise ValueError("ids, tokens and prompt_lens differ in length")
        self._requests = (list(ids), arrays, [int(length) for length in prompt_lens])

    def set_gaps(self, gaps: Sequence[Mapping[str, Any]]) -> None:
        """Record what is missing: one mapping with rank, site, depth, pass and reason a gap."""
        self._gaps = json.loads(json.dumps([dict(gap) for gap in gaps]))

    def update_provenance(self, more: Mapping[str, Any]) -> None:
        """Add top-level keys to the provenance, replacing those that are there."""
        self._provenance.update(json.loads(json.dumps(dict(more))))

    def close(self, state: str = schema.STATE_COMPLETE) -> None:
        """Write what is held back, mark the file `state` ("complete" or "recovered") and give it its name."""
        if state not in (schema.STATE_COMPLETE, schema.STATE_RECOVERED):
            raise ValueError(f"unknown state {state!r}")
        with self._writing():
            for streams in self._streams.values():
                for stream in streams.values():
                    stream.drain()
            self._write_requests()
            self._write_text("provenance", self._provenance)
            self._write_text("gaps", self._gaps)
            _set_text(self._file, "state", state)
            self._file.close()
            _sync(self.partial)
            self.partial.replace(self.path)

    def finish_rank(self, rank: int) -> None:
        """Write what is held back of a rank and take no more of it, so that ranks do not add up in memory."""
        with self._writing():
            for stream in self._streams[rank].values():
                stream.drain()
        self._streams[rank].clear()
        self._finished.add(rank)

    def abort(self) -> None:
        """Give up: close and remove the half-written file. An older trace at `path` stays."""
        self._file.close()
        self.partial.unlink(missing_ok=True)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
            raise HsprobeError(
                f"The trace {self.path} cannot be written: {reason}.",
                "Check that the folder exists, has room, and that no other command is writing this trace.",
            ) from error

    def _append_table(self, rank: int, table: str, known: Mapping[str, str], columns: Columns) -> int:
        if not set(known) - schema.OPTIONAL_COLUMNS <= set(columns) <= set(known):
            raise ValueError(f"{table} need exactly the columns {sorted(known)}, got {sorted(columns)}")
        arrays = {name: np.asarray(columns[name], dtype=known[name]) for name in known if name in columns}
        rows = len(next(iter(arrays.values())))
        arrays.update({name: np.zeros(rows, known[name]) for name in known.keys() - columns.keys()})
        if len({array.shape for array in arrays.values()}) != 1:
            raise ValueError(f"the columns of {table} differ in length")
        with self._writing():
            group = self._file["ranks"][str(rank)][table]
            return min(_extend(group[name], array) for name, array in arrays.items())

    def _stream(self, rank: int, name: str, data: npt.NDArray[Any], attrs: dict[str, Any]) -> _Stream:
        width = data.shape[1]
        stream = self._streams[rank].get(name)
        if stream is None:
            with self._writing():
                group = self._file["ranks"][str(rank)]["tensors"].create_group(name)
            chunks = attrs.get("chunks", 1)
            # A reader of one chunk of an aux vector should not have to read its neighbours.
            column_chunk = max(1, width // chunks if width % chunks == 0 else width)
            block = min(max(1, _BLOCK_BYTES // (column_chunk * data.dtype.itemsize)), _MAX_BLOCK_ROWS)
            held, index = np.empty((block, width), data.dtype), np.empty(block, np.int64)
            stream = _Stream(group, attrs, column_chunk, held, index)
            self._streams[rank][name] = stream
        known = stream.held.shape[1]
        if known != width or stream.attrs != attrs:
            raise ValueError(f"{name} changed from {known}, {stream.attrs} to {width}, {attrs}")
        return stream

    def _write_requests(self) -> None:
        ids, tokens, prompt_lens = self._requests
        group = self._file.create_group("requests")
        names = [one.encode() for one in ids]
        kind = _text_type(max(map(len, names), default=0))
        group.create_dataset("id", data=np.array(names, kind))
        numbers = {
            "offset": np.cumsum([0, *map(len, tokens)], dtype=np.int64),
            "token": np.concatenate([np.zeros(0, np.int64), *tokens]),
            "prompt_len": np.asarray(prompt_lens, np.int64),
        }
        for name, array in numbers.items():
            _column(group, name, np.dtype("<i8"), min(len(array), _COLUMN_CHUNK))
            _extend(group[name], array)

    def _write_text(self, name: str, value: Any) -> None:
        content = json.dumps(value).encode()
        self._file.create_dataset(name, data=np.array(content, _text_type(len(content))))


def _text_type(length: int) -> np.dtype[Any]:
    # Of fixed length, because HDF5 keeps other strings in a heap without a checksum.
    kind: np.dtype[Any] = h5py.string_dtype("utf-8", max(1, length))
    return kind


def _set_text(item: h5py.Group, name: str, value: str) -> None:
    content = value.encode()
    item.attrs.create(name, np.array(content, _text_type(len(content))))


def _attributes(
    site: str, dtype: str, depth: Depth | None, depths: Sequence[int] | None, chunks: int | None
) -> dict[str, Any]:
    attrs: dict[str, Any] = {"site": site, "dtype": dtype}
    if depth is not None:
        attrs["depth"] = schema.DEPTH_FINAL_CODE if depth == schema.DEPTH_FINAL else int(depth)
    if depths is not None:
        attrs["depths"] = [int(one) for one in depths]
    if chunks is not None:
        attrs["chunks"] = int(chunks)
    return attrs


def _check_block(
    name: str, data: npt.NDArray[Any], index_n: npt.NDArray[np.int64], dtype: str, n_rows: int
) -> None:
    if not all(part and part.isprintable() and part.strip(".") for part in name.split("/")):
        raise ValueError(f"{name!r} cannot be the name of a tensor")
    if dtype not in schema.STORAGE:
        raise ValueError(f"{name}: unknown dtype {dtype!r}, expected one of {sorted(schema.STORAGE)}")
    if data.dtype != np.dtype(schema.STORAGE[dtype]):
        raise ValueError(f"{name}: {dtype} is stored as {schema.STORAGE[dtype]}, got {data.dtype}")
    if data.ndim != 2 or index_n.shape != data.shape[:1]:
        raise ValueError(f"{name}: data {data.shape} and row index {index_n.shape} do not fit")
    if len(index_n) and not (index_n.min() >= 0 and index_n.max() < n_rows):
        raise ValueError(f"{name}: row index outside 0..{n_rows - 1}")


def _column(group: h5py.Group, name: str, dtype: np.dtype[Any], chunk: int) -> None:
    group.create_dataset(
        name, shape=(0,), maxshape=(None,), dtype=dtype, chunks=(max(1, chunk),), fletcher32=True
    )


def _extend(dataset: h5py.Dataset, more: npt.NDArray[Any]) -> int:
    first = int(dataset.shape[0])
    if len(more):
        dataset.resize(first + len(more), axis=0)
        dataset[first:] = more
    return first


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
