"""Which row belongs to which: equal token prefixes are equal contexts, and nothing else is compared."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hsprobe.compare.stack import Keys, Rows, Stack


@dataclass(frozen=True)
class Pairs:
    """Rows of one stack and their partners in another, parallel arrays [n], ascending in `left`."""

    left: Rows
    right: Rows

    def __len__(self) -> int:
        return len(self.left)


def pair(left: Stack, right: Stack) -> Pairs:
    """The partner in `right` of every usable row of `left` that has one.

    Two stacks of one trace that share passes are joined row by row, since the same context may have been
    computed more than once; all others by context. Where `right` holds a context more than once, its first
    row is taken.
    """
    if left.side == right.side:
        same = _lookup(left.keys, right.keys, by_row=True)
        if len(same):
            return same
    return by_context(left.keys, right.keys)


def by_context(left: Keys, right: Keys) -> Pairs:
    """Join on context; a pair whose positions differ is a hash collision and is dropped."""
    found = _lookup(left, right, by_row=False)
    agree = left.position[found.left] == right.position[found.right]
    return Pairs(found.left[agree], found.right[agree])


def _lookup(left: Keys, right: Keys, *, by_row: bool) -> Pairs:
    table, rows = right.by_row if by_row else right.by_context
    wanted = (left.row if by_row else left.context)[left.usable]
    if not len(table):
        return Pairs(left.usable[:0], left.usable[:0])
    at = np.minimum(np.searchsorted(table, wanted), len(table) - 1)
    hit = table[at] == wanted
    return Pairs(left.usable[hit], rows[at[hit]])


def token_twins(stack: Stack, rows: Rows) -> Pairs:
    """For rows of a stack: another usable row fed the same token in another context, where there is one.

    Only the embedding gives both rows the same vector.
    """
    keys = stack.keys
    _, first = keys.by_context
    order = first[np.argsort(keys.token[first], kind="stable")]
    token = keys.token[order]
    low = np.searchsorted(token, keys.token[rows], side="left")
    high = np.searchsorted(token, keys.token[rows], side="right")
    # Distinct contexts were kept, so of two neighbours with the same token at most one is the row itself.
    has = high - low >= 2
    low, rows = low[has], rows[has]
    twin = order[low]
    itself = keys.context[twin] == keys.context[rows]
    return Pairs(rows, np.where(itself, order[low + 1], twin).astype(np.int64))
