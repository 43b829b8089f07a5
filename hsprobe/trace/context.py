"""The context of a row: a 64-bit hash of the token ids up to and including its own. Standard library only.

The hash is a chain, so a prefix is hashed once however many rows follow it:
`h[i] = first 8 bytes, little-endian, of blake2b(h[i-1] as uint64 LE || token[i] as int64 LE)`, `h[-1] = 0`.
0 means "no context" in a trace; a hash that comes out 0 is written as 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from struct import Struct

_LINK = Struct("<Qq")
_HASH = Struct("<Q")

START = 0
"""The hash of no tokens at all, from which every chain starts."""


def extend(context: int, token_ids: Iterable[int]) -> list[int]:
    """Contexts of the tokens that follow a prefix.

    Args:
        context: context of the last token of the prefix; `START` for an empty prefix.
        token_ids: the ids after the prefix, each within int64.

    Returns:
        One context a token, in order.
    """
    contexts = []
    for token in token_ids:
        digest = blake2b(_LINK.pack(context, token)).digest()
        context = _HASH.unpack_from(digest)[0] or 1
        contexts.append(context)
    return contexts


def context_hashes(token_ids: Iterable[int]) -> list[int]:
    """Contexts of every token of a sequence: element i hashes `token_ids[0..i]`."""
    return extend(START, token_ids)
