"""Looks up the rows of a tensor by context, the key by which two traces are joined.

Letters: N rows of the tensor, M looked-up contexts.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt

from hsprobe.trace import schema
from hsprobe.trace.reader import Rank
from hsprobe.trace.tensor import Ints, Tensor

Contexts = npt.NDArray[np.uint64]


class RowIndex:
    """The rows of one tensor with the labels of its rank, findable by context.

    Attributes:
        context: [N] uint64, 0 where unknown.
        position, token, request: [N] int64.
        status, phase, model, mode: [N] uint8 codes of `schema.RowStatus`, `Phase`, `Model`, `CaptureMode`.

    Raises:
        HsprobeError: the trace is damaged where the row index of the tensor lies.
    """

    def __init__(self, rank: Rank, tensor: Tensor) -> None:
        rows = tensor.row_index
        passes = rank.rows["pass"][rows]
        self.context: Contexts = rank.rows["context"][rows]
        self.position: Ints = rank.rows["position"][rows]
        self.token: Ints = rank.rows["token"][rows]
        self.request: Ints = rank.rows["request"][rows]
        self.status: npt.NDArray[np.uint8] = rank.rows["status"][rows]
        self.phase: npt.NDArray[np.uint8] = rank.passes["phase"][passes]
        self.model: npt.NDArray[np.uint8] = rank.passes["model"][passes]
        self.mode: npt.NDArray[np.uint8] = rank.passes["mode"][passes]

    def __len__(self) -> int:
        return len(self.context)

    def where(
        self, *, phases: Collection[int] | None = None, statuses: Collection[int] | None = None
    ) -> npt.NDArray[np.bool_]:
        """[N] mask of rows that have a context, narrowed to some phases and statuses."""
        mask: npt.NDArray[np.bool_] = self.context != schema.NO_CONTEXT
        if phases is not None:
            mask &= _among(self.phase, phases)
        if statuses is not None:
            mask &= _among(self.status, statuses)
        return mask

    def find(self, contexts: Contexts, among: npt.NDArray[np.bool_] | None = None) -> Ints:
        """The first row that has each context.

        Args:
            contexts: [M] uint64.
            among: [N] mask of rows to look in; by default all that have a context.

        Returns:
            [M] int64 rows of the tensor, -1 where none has that context.
        """
        rows = np.flatnonzero(self.where() if among is None else among & self.where())
        order = np.argsort(self.context[rows], kind="stable")
        known = self.context[rows][order]
        slot = np.searchsorted(known, contexts)
        found = np.full(len(contexts), -1, np.int64)
        hit = slot < len(known)
        hit[hit] = known[slot[hit]] == contexts[hit]
        found[hit] = rows[order[slot[hit]]]
        return found


def _among(codes: npt.NDArray[np.uint8], wanted: Collection[int]) -> npt.NDArray[Any]:
    return np.isin(codes, np.fromiter(wanted, np.uint8, len(wanted)))
