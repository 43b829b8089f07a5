"""Reads a trace file, which may be damaged or hostile: only the rows and columns asked for, memory bounded.

Letters: N rows of a tensor, n rows of a selection, W its width, K chunks of width H, P passes, T rows of a
rank, R requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import h5py
import ml_dtypes
import numpy as np
import numpy.typing as npt

from hsprobe.errors import HsprobeError
from hsprobe.trace import _guard, schema

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Selection = slice | Ints | npt.NDArray[np.bool_] | None

_BLOCK_BYTES = 8 << 20
"""Most raw bytes read at once; what `read` returns comes on top."""
_MAX_TENSORS = 20_000
_MAX_NAME_PARTS = 4


class Requests:
    """The requests of a trace.

    Attributes:
        ids: [R] ids the server gave them.
        prompt_len: [R] int64, how many of the token ids were the prompt.
    """

    def __init__(self, group: h5py.Group, path: Path) -> None:
        self.ids = _guard.strings(group, "id", path)
        self.prompt_len: Ints = _guard.column(group, "prompt_len", path, "<i8")
        self._token: Ints = _guard.column(group, "token", path, "<i8")
        self._offset: Ints = _guard.column(group, "offset", path, "<i8")
        ends = self._offset[[0, -1]].tolist() if len(self._offset) else []
        if (
            len(self._offset) != len(self.ids) + 1
            or len(self.prompt_len) != len(self.ids)
            or ends != [0, len(self._token)]
            or (np.diff(self._offset) < 0).any()
            or ((self.prompt_len < 0) | (self.prompt_len > np.diff(self._offset))).any()
        ):
            raise _guard.damaged(path, "/requests", "its columns do not fit together")

    def __len__(self) -> int:
        return len(self.ids)

    def tokens(self, request: int) -> Ints:
        """Token ids of a request, prompt and output, int64."""
        return self._token[self._offset[request] : self._offset[request + 1]]


class Tensor:
    """What one site gave in one rank. Data stays in the file until it is read.

    Attributes:
        name: such as "layer/003".
        site: where it was taken.
        dtype: real element type, such as "bfloat16".
        depth: decoder layers applied, "final" (after the final norm), or None where that has no meaning.
        depths: of a vector of chunks: their depths in stored order as the producer declared them, or None.
        chunks: K, of a vector of chunks, or None.
        spread: "attn_tp" where SGLang held the rows in slices, one for each rank of attention TP,
            "tp_columns" where each rank has columns of its own by design; else None.
        shape: (N, W).
    """

    def __init__(
        self, group: h5py.Group, name: str, path: Path, n_rows: int, share: Callable[[Ints], Ints]
    ) -> None:
        self.name = name
        self._path = path
        self._n_rows = n_rows
        self._share = share
        self.site = _guard.text(group, "site", path) or ""
        self.dtype = _guard.text(group, "dtype", path) or ""
        if self.dtype not in schema.STORAGE or not self.site.isprintable():
            raise _guard.damaged(path, group.name, f"its dtype {self.dtype[:40]!r} or its site is not known")
        self._data = _guard.dataset(group, "data", path, schema.STORAGE[self.dtype], 2)
        self._row = _guard.dataset(group, "row", path, "<i8", 1)
        self.shape: tuple[int, int] = self._data.shape
        if self._row.shape[0] != self.shape[0]:
            raise _guard.damaged(
                path, group.name, f"{self.shape[0]} rows of data, {self._row.shape[0]} row indices"
            )
        depth = _guard.integer(group, "depth", path)
        self.depth: int | Literal["final"] | None = "final" if depth == schema.DEPTH_FINAL_CODE else depth
        self.depths = _guard.integers(group, "depths", path)
        self.chunks = _guard.integer(group, "chunks", path)
        self.spread = _guard.text(group, "spread", path)
        if self.chunks is not None and self.chunks < 1:
            raise _guard.damaged(path, group.name, f"it has {self.chunks} chunks")
        self._row_index: Ints | None = None

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def chunk_width(self) -> int:
        """H: width of one chunk; the whole width where the tensor is not made of chunks."""
        return self.shape[1] // (self.chunks or 1)

    @property
    def row_index(self) -> Ints:
        """[N] int64: which row of the rank each row of the tensor belongs to.

        Raises:
            HsprobeError: the file is damaged there.
        """
        if self._row_index is None:
            place = f"the rows of {self.name}"
            with _guard.sound(self._path, place):
                index = np.asarray(self._row[()])
            if len(index) and not (index.min() >= 0 and index.max() < self._n_rows):
                raise _guard.damaged(
                    self._path, place, f"one points outside the {self._n_rows} rows of its rank"
                )
            self._row_index = self._share(index)
        return self._row_index

    def read(self, sel: Selection = None, chunk: int | None = None) -> Floats:
        """Rows as float32.

        Args:
            sel: which rows: a slice, int64 indices in any order (repeats allowed), a mask [N], None for all.
            chunk: read only chunk k, the columns k*H to (k+1)*H.

        Returns:
            [n, W], or [n, H] with `chunk`.

        Raises:
            HsprobeError: the file is damaged there.
            IndexError: `sel` or `chunk` is out of range.
        """
        return self._read(sel, chunk, np.dtype(np.float32), self._to_float)

    def read_raw(self, sel: Selection = None, chunk: int | None = None) -> Array:
        """As `read`, but bit for bit in the storage type of `dtype`: bfloat16 as uint16, float8 as uint8."""
        return self._read(sel, chunk, self._data.dtype, lambda raw: raw)

    def _to_float(self, raw: Array) -> Floats:
        if raw.dtype != np.float32 and hasattr(ml_dtypes, self.dtype):
            raw = raw.view(np.dtype(getattr(ml_dtypes, self.dtype)))
        with np.errstate(over="ignore", invalid="ignore"):
            return raw.astype(np.float32, copy=False)

    def _read(
        self, sel: Selection, chunk: int | None, dtype: np.dtype[Any], convert: Callable[[Array], Array]
    ) -> Array:
        columns = self._columns(chunk)
        rows = self._index(sel)
        out = np.empty((len(rows), columns.stop - columns.start), dtype)
        with _guard.sound(self._path, f"tensor {self.name}"):
            if isinstance(rows, range):
                for lo, hi in self._blocks(rows.start, rows.stop, columns):
                    out[lo - rows.start : hi - rows.start] = convert(self._data[lo:hi, columns])
                return out
            order = np.argsort(rows, kind="stable")
            done = 0
            for near in self._runs(rows[order], columns):
                lo, hi = int(near[0]), int(near[-1]) + 1
                # Not kept in a variable: two blocks would then be alive at once.
                out[order[done : done + len(near)]] = convert(self._data[lo:hi, columns][near - lo])
                done += len(near)
        return out

    def _columns(self, chunk: int | None) -> slice:
        if chunk is None:
            return slice(0, self.shape[1])
        if not 0 <= chunk < (self.chunks or 1):
            raise IndexError(f"{self.name} has {self.chunks or 1} chunks, not a chunk {chunk}")
        if self.shape[1] % (self.chunks or 1):
            raise HsprobeError(
                f"{self._path}: {self.name} is {self.shape[1]} wide, no multiple of {self.chunks} chunks.",
                "Check that the capture and the model it came from agree on the number of aux layers.",
            )
        return slice(chunk * self.chunk_width, (chunk + 1) * self.chunk_width)

    def _index(self, sel: Selection) -> range | Ints:
        """The rows asked for: a range where they lie side by side, else indices."""
        if sel is None:
            return range(self.shape[0])
        if isinstance(sel, slice):
            rows = range(self.shape[0])[sel]
            if rows.step == 1:
                return range(rows.start, max(rows.start, rows.stop))
            return np.arange(rows.start, rows.stop, rows.step, dtype=np.int64)
        chosen = np.asarray(sel)
        if chosen.dtype == np.bool_:
            if chosen.shape != self.shape[:1]:
                raise IndexError(f"a mask of {chosen.shape} for {self.shape[0]} rows of {self.name}")
            chosen = np.flatnonzero(chosen)
        index = chosen.astype(np.int64, casting="same_kind")
        if len(index) and not (index.min() >= 0 and index.max() < self.shape[0]):
            raise IndexError(f"{self.name} has {self.shape[0]} rows, a selected one lies outside")
        return index

    def _blocks(self, start: int, stop: int, columns: slice) -> Iterator[tuple[int, int]]:
        row_bytes = max(1, (columns.stop - columns.start) * self._data.dtype.itemsize)
        step = max(1, _BLOCK_BYTES // row_bytes)
        stored = self._chunk_rows()
        # A block that ends inside a stored chunk would have it read twice.
        step = step // stored * stored if step > stored else step
        for lo in range(start, stop, step):
            yield lo, min(lo + step, stop)

    def _runs(self, index: Ints, columns: slice) -> Iterator[Ints]:
        """Cut sorted indices into runs that lie near each other, each to be read as one block."""
        cuts = np.flatnonzero(np.diff(index) > self._chunk_rows()) + 1
        for run in np.split(index, cuts):
            if not len(run):
                continue
            for lo, hi in self._blocks(int(run[0]), int(run[-1]) + 1, columns):
                near = run[np.searchsorted(run, lo) : np.searchsorted(run, hi)]
                if len(near):
                    yield near

    def _chunk_rows(self) -> int:
        return int(self._data.chunks[0]) if self._data.chunks else 1


class Rank:
    """What one process recorded.

    Attributes:
        index: number of the rank in the trace.
        coords: its place (tp, pp, dp, attn_tp) and how many places there are (tp_size, ...; at least 1).
        layers: (first, end) of the decoder layers it runs, None where it does not say or runs all.
        passes: [P] columns id, model, phase, mode, n_rows, time, graph (see `schema.PASS_COLUMNS`).
        rows: [T] columns pass, request, position, token, context, status (see `schema.ROW_COLUMNS`).
        tensors: name -> tensor.
    """

    def __init__(self, group: h5py.Group, index: int, path: Path, n_requests: int) -> None:
        self.index = index
        self.coords = {name: _guard.integer(group, name, path) or 0 for name in schema.COORDS}
        self.coords |= {name: max(1, _guard.integer(group, name, path) or 1) for name in schema.SIZES}
        first, end = (_guard.integer(group, name, path) for name in schema.LAYERS)
        self.layers = None if first is None or end is None else (first, end)
        self.passes = _table(group, "passes", schema.PASS_COLUMNS, path)
        self.rows = _table(group, "rows", schema.ROW_COLUMNS, path)
        self._check(group, path, n_requests)
        self._indices: list[Ints] = []
        self.tensors: dict[str, Tensor] = {}
        for name, found in _walk(_guard.group(group, "tensors", path), path):
            self.tensors[name] = Tensor(found, name, path, len(self.rows["pass"]), self._share)

    def _check(self, group: h5py.Group, path: Path, n_requests: int) -> None:
        for table, column, low, high in (
            ("passes", "model", 0, max(schema.Model)),
            ("passes", "phase", 0, max(schema.Phase)),
            ("passes", "mode", 0, max(schema.CaptureMode)),
            ("passes", "graph", 0, max(schema.Launch)),
            ("rows", "status", 0, max(schema.RowStatus)),
            ("rows", "pass", 0, len(self.passes["id"]) - 1),
            ("rows", "request", schema.NO_REQUEST, n_requests - 1),
        ):
            values = getattr(self, table)[column]
            if len(values) and not (values.min() >= low and values.max() <= high):
                raise _guard.damaged(
                    path, f"{group.name}/{table}/{column}", f"a value lies outside {low}..{high}"
                )

    def _share(self, index: Ints) -> Ints:
        """Most tensors of a rank cover the same rows; their indices are kept once."""
        for known in self._indices:
            if np.array_equal(known, index):
                return known
        self._indices.append(index)
        return index


class Trace:
    """An open trace; a context manager.

    Attributes:
        path: the file.
        created: when it was made, ISO 8601, UTC.
        state: "complete", or "recovered" (a server died; what it had flushed is here).
        provenance: where the trace came from, see `docs/trace-format.md`.
        gaps: what is missing and why: mappings with rank, site, depth, pass, reason.
        requests: the requests.
        ranks: one `Rank` a recording process.
    """

    def __init__(self, path: Path, file: h5py.File) -> None:
        self.path = path
        self._file = file
        self.created = _guard.text(file, "created", path) or ""
        self.state = _guard.text(file, "state", path) or ""
        self.provenance: dict[str, Any] = _guard.document(file, "provenance", path)
        self.gaps: list[dict[str, Any]] = _guard.document(file, "gaps", path)
        if not isinstance(self.provenance, dict):
            raise _guard.damaged(path, "/provenance", "it is not a JSON object")
        if not isinstance(self.gaps, list) or not all(isinstance(gap, dict) for gap in self.gaps):
            raise _guard.damaged(path, "/gaps", "it is not a JSON list of objects")
        self.requests = Requests(_guard.group(file, "requests", path), path)
        ranks = _guard.group(file, "ranks", path)
        names = _guard.members(ranks, path)
        if not all(name.isascii() and name.isdigit() for name in names):
            raise _guard.damaged(path, "/ranks", "a member is not a number")
        self.ranks = [
            Rank(_guard.group(ranks, name, path), int(name), path, len(self.requests))
            for name in sorted(names, key=int)
        ]

    @classmethod
    def open(cls, path: Path | str) -> Trace:
        """Open a finished trace.

        Raises:
            HsprobeError: the file is missing, no trace, half-written, damaged, or of a newer schema.
        """
        path = Path(path)
        file = _guard.open_file(path)
        try:
            return cls(path, file)
        except BaseException:
            file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; tensors can be read no more."""
        self._file.close()


def _table(group: h5py.Group, name: str, known: dict[str, str], path: Path) -> dict[str, Array]:
    table = _guard.group(group, name, path)
    columns = {
        column: _guard.column(table, column, path, code)
        for column, code in known.items()
        if column in table or column not in schema.OPTIONAL_COLUMNS
    }
    rows = len(next(iter(columns.values())))
    for column in known.keys() - columns.keys():
        columns[column] = np.zeros(rows, known[column])
    if len({len(values) for values in columns.values()}) != 1:
        raise _guard.damaged(path, table.name, "its columns differ in length")
    return columns


def _walk(tensors: h5py.Group, path: Path) -> Iterator[tuple[str, h5py.Group]]:
    """Groups that hold data, by name; names may have a few parts ("layer/003")."""
    waiting = [("", tensors)]
    seen = 0
    while waiting:
        prefix, parent = waiting.pop()
        names = _guard.members(parent, path)
        seen += len(names)
        # Hard links can form a cycle; neither bound is near what a capture makes.
        if seen > _MAX_TENSORS or prefix.count("/") > _MAX_NAME_PARTS:
            raise _guard.damaged(path, tensors.name, "its groups are nested without end")
        for name in names:
            found = _guard.group(parent, name, path)
            if "data" in found:
                yield prefix + name, found
            else:
                waiting.append((f"{prefix}{name}/", found))
