"""Words for depths and shapes in the sentences of the rules."""

from __future__ import annotations

from collections.abc import Sequence

from hsprobe.diagnose.naming import listed


def depth_list(depths: Sequence[int]) -> str:
    """`3, 6, 9 (outputs of layers 2, 5, 8)`."""
    if not depths or min(depths) < 1:
        return listed(depths)
    what = "outputs of layers" if len(depths) > 1 else "output of layer"
    return f"{listed(depths)} ({what} {listed(d - 1 for d in depths)})"


def depth_words(depths: Sequence[int]) -> str:
    """`depth 3`, `depths 3, 6`."""
    return f"{'depth' if len(depths) == 1 else 'depths'} {listed(depths)}"


def shape(sizes: Sequence[int]) -> str:
    """`[128, 384]`."""
    return f"[{', '.join(map(str, sizes))}]"


def plain(number: float) -> str:
    """`1000000`, not `1e+06`."""
    return str(int(number)) if number == int(number) else str(number)
