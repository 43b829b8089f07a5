"""Reads a trace file, which may be damaged or hostile. What its tensors hold stays in the file, see `tensor`.

Letters: P passes, T rows of a rank, R requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import h5py
import numpy as np
import numpy.typing as npt

from hsprobe.remote.location import Location, locate
from hsprobe.trace import _guard, schema
from hsprobe.trace.tensor import Tensor

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]

_MAX_TENSORS = 20_000
_MAX_NAME_PARTS = 4


class Requests:
    """The requests of a trace.

    Attributes:
        ids: [R] ids the server gave them.
        prompt_len: [R] int64, how many of the token ids were the prompt.
    """

    def __init__(self, group: h5py.Group, path: Location) -> None:
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

    def __init__(self, group: h5py.Group, index: int, path: Location, n_requests: int) -> None:
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

    def _check(self, group: h5py.Group, path: Location, n_requests: int) -> None:
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

    def __init__(self, path: Location, file: h5py.File) -> None:
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
    def open(cls, path: Location | str) -> Trace:
        """Open a finished trace.

        Raises:
            HsprobeError: the file is missing, no trace, half-written, damaged, or of a newer schema.
        """
        path = locate(path)
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


def _table(group: h5py.Group, name: str, known: dict[str, str], path: Location) -> dict[str, Array]:
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


def _walk(tensors: h5py.Group, path: Location) -> Iterator[tuple[str, h5py.Group]]:
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
