"""Reads a trace for tests, without the comparing code that the tests are to check.

Letters: N rows, W width.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hsprobe.trace.reader import Trace
from hsprobe.trace.schema import Model, Phase, RowStatus

COMMITTED = (RowStatus.PLAIN, RowStatus.ACCEPTED)


@dataclass
class Rows:
    """Rows of one tensor with what is known of each."""

    values_NW: np.ndarray
    context: np.ndarray
    position: np.ndarray
    phase: np.ndarray
    status: np.ndarray


def rows_of(path: Path, name: str, *, rank: int = 0) -> Rows:
    """All rows of a tensor."""
    with Trace.open(path) as trace:
        recorded = trace.ranks[rank]
        tensor = recorded.tensors[name]
        index = tensor.row_index
        columns = recorded.rows
        return Rows(
            values_NW=tensor.read(),
            context=columns["context"][index],
            position=columns["position"][index],
            phase=recorded.passes["phase"][columns["pass"][index]],
            status=columns["status"][index],
        )


@dataclass
class RankRows:
    """What one rank says of its passes and rows.

    Attributes:
        ids: (model, id) of each pass.
        rows: the columns of its row table.
    """

    ids: list[tuple[int, int]]
    rows: dict[str, np.ndarray]


def ranks_of(path: Path) -> list[RankRows]:
    """All ranks of a trace."""
    with Trace.open(path) as trace:
        return [
            RankRows(
                list(zip(rank.passes["model"].tolist(), rank.passes["id"].tolist(), strict=True)),
                dict(rank.rows),
            )
            for rank in trace.ranks
        ]


def by_context(rows: Rows) -> dict[int, np.ndarray]:
    """Context -> the row's values."""
    return {int(context): values for context, values in zip(rows.context, rows.values_NW, strict=True)}


def worst_relative_error(rows: Rows, reference: dict[int, np.ndarray], phase: Phase) -> tuple[float, int]:
    """Largest |difference| over largest |value| of a row, and how many committed rows of the phase there are.

    Every committed row must have a partner in the reference.
    """
    chosen = np.isin(rows.status, [int(s) for s in COMMITTED]) & (rows.phase == int(phase))
    errors = [
        float(np.abs(values - reference[int(context)]).max() / np.abs(reference[int(context)]).max())
        for values, context in zip(rows.values_NW[chosen], rows.context[chosen], strict=True)
    ]
    return max(errors, default=0.0), len(errors)


def names_of(path: Path) -> set[str]:
    with Trace.open(path) as trace:
        return set(trace.ranks[0].tensors)


__all__ = [
    "Model",
    "Phase",
    "RowStatus",
    "by_context",
    "names_of",
    "ranks_of",
    "rows_of",
    "worst_relative_error",
]
