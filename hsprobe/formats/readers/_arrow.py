"""Rows of a data set as Hugging Face's `datasets` saves it: `state.json` and Arrow streams beside it."""

from __future__ import annotations

import re
from bisect import bisect_right
from typing import Any

import numpy as np

from hsprobe.errors import HsprobeError
from hsprobe.formats.source import Source
from hsprobe.formats.stored import Ints, damaged
from hsprobe.remote.stream import local_copy

_STATE = "state.json"
_COLUMNS = ("input_ids", "loss_mask")
_FILE = re.compile(r"[\w-][\w.-]{0,200}\.arrow")
_MISSING = "the loss masks lie in an arrow data set; 'pip install pyarrow' lets hsprobe read them too"


def data_set(source: Source) -> tuple[DataSet | None, str]:
    """(the data set in the folder, a note where there is one that cannot be read)."""
    if not source.is_folder or not source.has(_STATE):
        return None, ""
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        return None, _MISSING
    try:
        return DataSet(source), ""
    except HsprobeError as error:
        return None, f"its data set is left out: {error.what}"


class DataSet:
    """Record batches of a data set; integer lists of the columns known here.

    Raises:
        HsprobeError: it is damaged.
    """

    def __init__(self, source: Source) -> None:
        state = source.load(_STATE)
        files = state.get("_data_files") if isinstance(state, dict) else None
        names = [one.get("filename") for one in files or [] if isinstance(one, dict)]
        if not names or not all(isinstance(name, str) and _FILE.fullmatch(name) for name in names):
            raise damaged(_STATE, "it names no files of a data set beside it")
        self._batches: list[Any] = []
        self._starts = [0]
        for name in names:
            self._read(source, str(name))

    def _read(self, source: Source, name: str) -> None:
        import pyarrow as pa

        where = source.place_of(name)
        try:
            # Mapped, not read: a data set may be larger than memory, and few of its rows are asked for.
            with (
                local_copy(where) as place,
                pa.memory_map(str(place)) as file,
                pa.ipc.open_stream(file) as stream,
            ):
                for batch in stream:
                    wanted = batch.select([one for one in _COLUMNS if one in batch.schema.names])
                    self._batches.append(wanted)
                    self._starts.append(self._starts[-1] + wanted.num_rows)
        except _errors() as error:
            raise damaged(name, "it is no Arrow stream that can be read") from error

    def row(self, index: int) -> dict[str, Ints] | None:
        """The integer columns of one row, None beyond the last."""
        if not 0 <= index < self._starts[-1]:
            return None
        at = bisect_right(self._starts, index) - 1
        place = f"row {index} of the data set"
        try:
            row = self._batches[at].slice(index - self._starts[at], 1)
            row.validate(full=True)
            values = row.to_pydict()
        except _errors() as error:
            raise damaged(place, "it makes no sense") from error
        found = {}
        for name, (value,) in values.items():
            try:
                found[name] = np.asarray(value, dtype=np.int64).reshape(-1)
            except (TypeError, ValueError, OverflowError) as error:
                raise damaged(place, f"its {name} is no list of integers") from error
        return found


def _errors() -> tuple[type[Exception], ...]:
    import pyarrow as pa

    return (pa.ArrowException, OSError, ValueError, KeyError, MemoryError, OverflowError)
