"""Which rows of a pass a tensor holds: all of them, one a request, or the slice of one rank.

SGLang may pad a pass behind our labels, so that ranks agree on a length (``forward_batch_info.py:
ForwardBatch.prepare_mlp_sync_batch`` and ``_pad_inputs_to_size``, 0.5.23; padding rows come last), and may
spread its rows over the ranks of attention TP between layers. There are two ways to cut: ``tensor_split``
(``layer_boundary/adapters/attention.py:attn_tp_slice``: the first ranks get one row more) and equal parts,
the last ones padded (``layernorm_sp.py:sp_entry_scatter``).
"""

from dataclasses import dataclass
from typing import Any


class NotRecordable(Exception):
    """This pass or tensor cannot be recorded rightly: a gap, while its probe stays armed."""


@dataclass(frozen=True)
class Extent:
    """How long a pass is, in its labels and in the forward under way.

    Attributes:
        n_rows: rows as labelled, before SGLang padded them.
        n_padded: rows of the batch in the forward.
        n_requests: requests with rows.
        part, n_parts: this rank's place among those that may hold slices, and how many these are.
    """

    n_rows: int
    n_padded: int
    n_requests: int
    part: int = 0
    n_parts: int = 1


@dataclass(frozen=True)
class Placed:
    """Where a tensor's rows lie.

    Attributes:
        rows: as a spool's tensor record says it (see ``hsprobe.capture.assemble``).
        count: rows of the tensor that are rows of the pass; those behind them are to be left out.
        is_slice: the tensor holds this rank's slice.
    """

    rows: Any
    count: int
    is_slice: bool = False


def place(n: int, extent: Extent, *, scattered: bool | None = None, last: bool = False) -> Placed:
    """Say which rows of the pass the n rows of a tensor are.

    Args:
        n: rows of the tensor.
        scattered: whether SGLang holds this tensor in slices; ``None`` where it does not say.
        last: whether this tensor may hold one row a request.

    Raises:
        NotRecordable: none fits, or more than one does.
    """
    if scattered:
        return _slice(n, extent)
    if n == extent.n_padded:
        return Placed(None, n)
    if n == extent.n_rows:
        return Placed({"first": 0, "count": n}, n)
    if last and n == extent.n_requests:
        return Placed("last", n)
    if scattered is None and extent.n_parts > 1:
        return _slice(n, extent)
    raise _unplaced(n, extent)


def _slice(n: int, extent: Extent) -> Placed:
    whole, parts, part = extent.n_padded, extent.n_parts, extent.part
    if parts < 2:
        raise NotRecordable("rows that are spread over ranks otherwise than by attention TP")
    short, longer = divmod(whole, parts)
    # Ranks that `tensor_split` gives one row more have the same slice either way.
    first = part * n if n == short + (longer > 0) else part * short + longer
    if n not in (short, short + (longer > 0)):
        raise _unplaced(n, extent)
    count = max(0, min(n, whole - first))
    return Placed({"first": min(first, whole), "count": count}, count, is_slice=True)


def _unplaced(n: int, extent: Extent) -> NotRecordable:
    padded = f" padded to {extent.n_padded}" if extent.n_padded != extent.n_rows else ""
    return NotRecordable(
        f"{n} rows in a pass of {extent.n_rows} rows{padded} and {extent.n_requests} requests"
    )
