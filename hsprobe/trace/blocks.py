"""Spool records of passes that were read from CUDA graphs, taken apart into ordinary ones.

A probe writes such passes many to a record, each as rows of columns, and describes the columns once in a
"layout" record before. `Expander` gives "pass" and "tensor" records for them, as eager passes have.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from hsprobe.trace.schema import ITEM_SIZE
from hsprobe.trace.spool import Record

LABELS = ("~ids", "~positions")

Bytes = npt.NDArray[np.uint8]


class Expander:
    """Reads the records of one spool, in order."""

    def __init__(self) -> None:
        self._layouts: dict[int, dict[str, Any]] = {}

    def expand(self, record: Record) -> Iterator[Record]:
        """The ordinary records that a record stands for: itself, unless it is of graphs.

        Raises:
            ValueError, KeyError, TypeError, IndexError: it is malformed.
        """
        if record.kind == "layout":
            self._layouts[int(record.header["layout"])] = record.header
        elif record.kind == "blocks":
            whole = np.frombuffer(record.payload, np.uint8)
            for one in record.header["passes"]:
                yield from self._pass(record, one, whole)
        else:
            yield record

    def _pass(self, record: Record, one: dict[str, Any], whole: Bytes) -> Iterator[Record]:
        layout = self._layouts.get(int(one["layout"]))
        if layout is None:
            raise ValueError(f"its layout {one['layout']} was not described")
        header = {name: value for name, value in one.items() if name not in ("layout", "pieces", "second")}
        if len(layout["groups"]) != len(one["pieces"]):
            raise ValueError(f"{len(one['pieces'])} pieces for {len(layout['groups'])} groups of columns")
        tables = [
            _table(whole, piece, int(group["row_size"]))
            for group, piece in zip(layout["groups"], one["pieces"], strict=True)
        ]
        for step in range(int(layout["steps"])):
            number = int(one["pass"]) + step
            columns = [
                (table, column, None if index == 0 else "last")
                for index, (group, table) in enumerate(zip(layout["groups"], tables, strict=True))
                for column in group["columns"]
                if int(column["step"]) == step
            ]
            found = {column["name"]: _bytes_of(table, column) for table, column, _ in columns}
            if layout["labelled"]:
                labels = b"".join(found[name] for name in LABELS)
                counts = {"pass": number, "nth": int(one["nth"]) + step}
                yield Record("pass", {**header, **counts}, labels, record.end)
            for table, column, rows in columns:
                if column["name"] not in LABELS:
                    yield _tensor(record, number, column, len(table), rows, found[column["name"]])


def _table(whole: Bytes, piece: Any, row_size: int) -> Bytes:
    first, size = (int(value) for value in piece)
    if first < 0 or size < 0 or first + size > len(whole) or row_size < 1 or size % row_size:
        raise ValueError(f"rows of {row_size} bytes do not lie at {first} + {size} of {len(whole)} bytes")
    return whole[first : first + size].reshape(-1, row_size)


def _bytes_of(table: Bytes, column: dict[str, Any]) -> bytes:
    first = int(column["offset"])
    size = int(column["width"]) * ITEM_SIZE[str(column["dtype"])]
    if first < 0 or size < 0 or first + size > table.shape[1]:
        raise ValueError(f"column {column['name']} lies outside its row")
    return table[:, first : first + size].tobytes()


def _tensor(
    record: Record, number: int, column: dict[str, Any], n_rows: int, rows: str | None, payload: bytes
) -> Record:
    header = {
        "pass": number,
        "name": column["name"],
        "site": column.get("site"),
        "depth": column.get("depth"),
        "depths": column.get("depths"),
        "spread": column.get("spread"),
        "chunks": column.get("chunks"),
        "dtype": column["dtype"],
        "shape": [n_rows, int(column["width"])],
        "rows": rows,
        "slice": False,
    }
    return Record("tensor", header, payload, record.end)
