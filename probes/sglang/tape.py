"""What the probes copy inside one CUDA graph, and where each copy lies.

While a graph is captured, a probe's copy becomes part of it: every replay then refreshes the copy at the
same address. All copies of a graph are columns of one buffer, a row of the buffer for each row of the pass,
so that the rows in use are read with one copy, however many sites there are.

Letters: R rows of the graph (padding included), n of them in use, W width of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from hsprobe.probes.sglang.gather import Copy, gather
from hsprobe.probes.sglang.labels import Form
from hsprobe.probes.sglang.staging import Part

COLUMN_ALIGNMENT = 16
ROW_ALIGNMENT = 64
IDS, POSITIONS = "~ids", "~positions"
LAST_TO_GO = ("layer", "mid")
"""Sites that are left out, the last named first, where the buffer would be larger than allowed."""

Reserve = Callable[[int, torch.device], "torch.Tensor | None"]


@dataclass
class Column:
    """One tensor of one step of a graph.

    Attributes:
        step: which of the forwards in the graph; a draft's decode graph holds several.
        rows, width: of the whole tensor, in elements.
        offset: bytes from the beginning of a row.
        header: site, depth, depths, chunks.
        last: it may hold one row a request.
    """

    name: str
    step: int
    rows: int
    width: int
    dtype: torch.dtype
    header: dict[str, Any]
    last: bool = False
    offset: int = 0

    @property
    def size(self) -> int:
        """Bytes of a row."""
        return self.width * self.dtype.itemsize

    def described(self) -> dict[str, Any]:
        """As the spool's layout record holds it."""
        dtype = str(self.dtype).removeprefix("torch.")
        return {
            "name": self.name,
            "step": self.step,
            "dtype": dtype,
            "width": self.width,
            "offset": self.offset,
            **self.header,
        }


@dataclass
class Group:
    """Columns with the same number of rows.

    Attributes:
        flat: [R * row_size] uint8, row after row.
    """

    rows: int
    columns: list[Column]
    row_size: int
    flat: torch.Tensor


@dataclass
class Tape:
    """The copies of one graph: measured while it warms up, then recorded into it.

    Attributes:
        number: names the layout in the spool.
        key: the backend's key of the graph with the copies.
        phase: "draft_decode" for a graph of several of the draft's steps, else empty: the pass knows.
        steps: forwards in the graph.
        left_out: sites whose copies found no room.
        labelled: whether token ids and positions are among the columns.
        form, parts: the passes that were read last, and what of the buffer they use.
    """

    number: int
    key: Any
    phase: str = ""
    steps: int = 1
    labelled: bool = False
    groups: list[Group] = field(default_factory=list)
    left_out: set[str] = field(default_factory=set)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    form: Form | None = None
    parts: list[Part] = field(default_factory=list)
    _columns: dict[tuple[int, str], Column] = field(default_factory=dict)
    _views: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)
    _step: int = -1
    _recording: bool = False
    _held: list[Copy] | None = None
    _done: set[tuple[int, str]] = field(default_factory=set)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def wanted(self) -> bool:
        """Whether anything but labels is to be copied."""
        return any(name not in (IDS, POSITIONS) for _, name in self._columns)

    def begin(self, *, recording: bool) -> None:
        """The graph's code is about to run: to warm up, or to be captured."""
        self._recording = recording
        self._step = -1
        self._done.clear()
        if not recording:
            self._columns.clear()

    def next_step(self, phase: str) -> None:
        """One of several forwards in the graph begins."""
        self.phase = phase
        self._step += 1

    def put(
        self, name: str, parts: Sequence[torch.Tensor], header: dict[str, Any], *, last: bool = False
    ) -> None:
        """Copy a tensor, or note how large it is.

        Args:
            parts: [R, W] tensors that lie side by side; together they are one tensor.
            last: R may be the number of requests.
        """
        key = max(self._step, 0), name
        if not self._recording:
            width = sum(part.shape[1] for part in parts)
            one = parts[0]
            self._columns[key] = Column(name, key[0], one.shape[0], width, one.dtype, header, last)
            self.device = one.device
            return
        view = self._views.get(key)
        if view is None:
            return
        first, copies = 0, []
        for part in parts:
            size = part.shape[1] * part.element_size()
            copies.append((view[:, first : first + size], part.detach()))
            first += size
        if self._held is None:
            gather(copies)
        else:
            self._held += copies
        self._done.add(key)

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is put in this context is copied at its end, at once; nothing in it changes a tensor."""
        if self._held is not None:
            yield
            return
        self._held = []
        try:
            yield
            by_rows: dict[int, list[Copy]] = {}
            for copy in self._held:
                by_rows.setdefault(copy[0].shape[0], []).append(copy)
            for copies in by_rows.values():
                gather(copies)
        except BaseException:
            self._done.clear()
            raise
        finally:
            self._held = None

    @property
    def complete(self) -> bool:
        """Whether all that is read of the graph was copied in it."""
        return self._done == self._views.keys()

    def labels(self, ids_R: torch.Tensor, positions_R: torch.Tensor) -> None:
        """Copy what each row of the pass is."""
        for name, labels_R in ((IDS, ids_R), (POSITIONS, positions_R)):
            self.put(name, (labels_R.to(torch.int64).unsqueeze(1),), {})

    def lay_out(self, reserve: Reserve) -> None:
        """Give every column its place.

        Args:
            reserve: gives a buffer of so many bytes on a device, outside of any graph's memory, or None.
        """
        columns = self._placeable()
        for site in (None, *reversed(LAST_TO_GO)):
            if site is not None:
                columns = [column for column in columns if column.header.get("site") != site]
                self.left_out.add(site)
            buffer = reserve(_size(columns), self.device)
            if buffer is not None:
                self._place(columns, buffer)
                return
        self.left_out.add("every site")
        self._place([], None)

    def _placeable(self) -> list[Column]:
        """Columns whose rows are those of the pass, or of its requests."""
        columns = list(self._columns.values())
        most = max((column.rows for column in columns), default=0)
        placeable = [column for column in columns if column.rows == most or column.last]
        self.left_out = {column.name for column in columns} - {column.name for column in placeable}
        return placeable

    def _place(self, columns: Sequence[Column], buffer: torch.Tensor | None) -> None:
        self.groups, self._views = [], {}
        at = 0
        for rows, members in _by_rows(columns):
            row_size = _arrange(members)
            assert buffer is not None
            flat = buffer[at : at + rows * row_size]
            self.groups.append(Group(rows, members, row_size, flat))
            table = flat.view(rows, row_size)
            for column in members:
                place = slice(column.offset, column.offset + column.size)
                self._views[column.step, column.name] = table[:, place]
            at += rows * row_size
        self.steps = 1 + max((column.step for column in columns), default=0)
        self.labelled = (0, IDS) in self._views

    def described(self) -> dict[str, Any]:
        """The layout record."""
        groups = [
            {"row_size": group.row_size, "columns": [column.described() for column in group.columns]}
            for group in self.groups
        ]
        return {"layout": self.number, "steps": self.steps, "labelled": self.labelled, "groups": groups}


def _by_rows(columns: Iterable[Column]) -> list[tuple[int, list[Column]]]:
    groups: dict[int, list[Column]] = {}
    for column in columns:
        groups.setdefault(column.rows, []).append(column)
    return sorted(groups.items(), reverse=True)


def _arrange(columns: Sequence[Column]) -> int:
    """Set the columns' offsets; returns the size of a row."""
    at = 0
    for column in columns:
        column.offset = at
        at += -(-column.size // COLUMN_ALIGNMENT) * COLUMN_ALIGNMENT
    return -(-at // ROW_ALIGNMENT) * ROW_ALIGNMENT


def _size(columns: Iterable[Column]) -> int:
    return sum(rows * _arrange(members) for rows, members in _by_rows(columns))
