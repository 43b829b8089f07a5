"""Names, codes and limits of the trace file, importable anywhere: standard library only."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

FORMAT: Final = "hsprobe-trace"
SCHEMA_VERSION: Final = 1
PARTIAL_SUFFIX: Final = ".partial"

STATE_WRITING: Final = "writing"
STATE_COMPLETE: Final = "complete"
STATE_RECOVERED: Final = "recovered"

DEPTH_FINAL: Final = "final"
DEPTH_FINAL_CODE: Final = -2
"""How depth "final" (after the final norm) is written in the file, where depths are integers."""

NO_CONTEXT: Final = 0
"""Context of a row whose token prefix is not known (or that stands for no token at all)."""
NO_REQUEST: Final = -1

HEALTH_CHECK_PREFIX: Final = "HEALTH_CHECK"
"""Request ids that start so are SGLang's own probes of itself; a trace leaves them out."""


class Phase(IntEnum):
    """What a forward pass was for."""

    PREFILL = 0
    DECODE = 1
    VERIFY = 2
    DRAFT_EXTEND = 3
    DRAFT_DECODE = 4


class CaptureMode(IntEnum):
    """Which hidden states the server itself kept of a pass: none, one row a request, or every row."""

    NULL = 0
    LAST = 1
    FULL = 2


class RowStatus(IntEnum):
    """Whether a row's token became part of its request."""

    PLAIN = 0
    """Prefill and decode rows: the token was already committed."""
    ACCEPTED = 1
    REJECTED = 2
    UNKNOWN = 3
    """The fate of the row cannot be told, for example past the end of the known token ids."""
    PADDING = 4


class Launch(IntEnum):
    """How the kernels of a pass were started."""

    EAGER = 0
    """One by one, or the producer did not say."""
    GRAPH = 1
    """Replayed from a CUDA graph, the whole pass or most of it."""


class Model(IntEnum):
    """Which of the two models ran the pass."""

    TARGET = 0
    DRAFT = 1


STORAGE: Final[dict[str, str]] = {
    "float64": "<f8",
    "float32": "<f4",
    "float16": "<f2",
    "bfloat16": "<u2",
    "float8_e4m3fn": "|u1",
    "float8_e4m3fnuz": "|u1",
    "float8_e5m2": "|u1",
    "float8_e5m2fnuz": "|u1",
    "float8_e8m0fnu": "|u1",
    "int64": "<i8",
    "int32": "<i4",
    "int16": "<i2",
    "int8": "|i1",
    "uint8": "|u1",
}
"""Element type of a tensor -> numpy code of the type its bits are stored as."""

ITEM_SIZE: Final[dict[str, int]] = {name: int(code[2:]) for name, code in STORAGE.items()}
"""Element type of a tensor -> bytes an element."""

PASS_COLUMNS: Final[dict[str, str]] = {
    "id": "<i8",
    "model": "|u1",
    "phase": "|u1",
    "mode": "|u1",
    "n_rows": "<i8",
    "time": "<f8",
    "graph": "|u1",
}
OPTIONAL_COLUMNS: Final = frozenset({"graph"})
"""Columns that a writer may leave out and an older file lacks; they are then 0 everywhere."""
ROW_COLUMNS: Final[dict[str, str]] = {
    "pass": "<i8",
    "request": "<i8",
    "position": "<i8",
    "token": "<i8",
    "context": "<u8",
    "status": "|u1",
}
COORDS: Final = ("tp", "pp", "dp", "attn_tp")
"""Attributes of a rank: its place in each kind of parallelism."""
SIZES: Final = ("tp_size", "pp_size", "dp_size", "attn_tp_size")
"""Attributes of a rank: how many places there are of each kind; 1 where it does not say."""
LAYERS: Final = ("first_layer", "end_layer")
"""Attributes of a rank that runs only the decoder layers from the one up to the other, without it."""
NOT_JOINED: Final = -1
"""Id of a pass whose labels contradict those of other ranks: it is no rank's partner."""
SPREAD_ATTN_TP: Final = "attn_tp"
"""Attribute `spread` of a tensor whose rows SGLang held in slices, one for each rank of attention TP."""
SPREAD_COLUMNS: Final = "tp_columns"
"""Attribute `spread` of a tensor of which each rank of tensor parallelism has its own columns, by design."""
