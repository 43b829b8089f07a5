"""Faults of ranks planted in traces of many ranks, each with the codes that must come out.

Shapes: n rows, H channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.ranks.sharded import (
    DEPTHS,
    Change,
    Keep,
    Tensors,
    chunk,
    data_parallel,
    layer,
    mid,
    parts,
    shard,
)
from tests.synthetic import Floats, H, L, World, write_infer, write_train

SITES = ("aux", "layer", "mid", "draft.input")


@dataclass
class RankCase:
    """One comparison of a capture of several ranks.

    Attributes:
        codes: what must be named, sorted; `between`: what the ranks alone show, where that is not the same.
        says: words that the titles must hold, `{last}` standing for the last rank.
        made: depths that the server hands over.
    """

    name: str
    codes: str
    change: Change | None = None
    says: Sequence[str] = ()
    between: str | None = None
    made: Sequence[int] = DEPTHS
    every: bool = False
    keep: Keep | None = None
    infer: dict[str, Any] = field(default_factory=dict)
    coords: Callable[[int], dict[str, int]] | None = None
    names: Callable[[int, str], bool] | None = None
    padded: int | None = None

    def write(self, folder: Path, dtype: str, ranks: int, without: Sequence[str] = ()) -> tuple[Path, Path]:
        """(training dump, capture). `without`: sites that are not kept, once the fault is planted."""
        world = World(dtype=dtype)
        train = write_train(folder / "t.h5", DEPTHS, world=world, every=self.every)
        made = {"ids": [d - 1 for d in DEPTHS], **self.infer}
        one = write_infer(folder / "one.h5", self.made, world=world, sites=SITES, **made)
        if self.padded is not None:
            return train, data_parallel(one, folder / "i.h5", ranks, taken=self.padded)
        return train, shard(
            one, folder / "i.h5", ranks, self.change, keep=self.keep, coords=self.coords, names=self.names,
            without=without,
        )  # fmt: skip


def handed(change: Callable[[int, int, int, Floats, Tensors], Floats]) -> Change:
    """A change of the chunks, in aux and so in what the draft is handed: (rank, ranks, chunk, values, all) "
    "-> values."""

    def apply(rank: int, ranks: int, held: Tensors) -> None:
        before = held["aux"].copy()
        for k in range(len(DEPTHS)):
            chunk(held["aux"], k)[:] = change(rank, ranks, k, chunk(before, k).copy(), held)
        if "draft.input" in held:
            # The rows of the draft's passes are those of the target's, one for one.
            held["draft.input"] = held["aux"].copy()

    return apply


def term(held: Tensors, what: str, depth: int) -> Floats:
    """What a layer adds."""
    state, before, middle = held[layer(depth)], held[layer(depth - 1)], held[mid(depth - 1)]
    return {"mlp": state - middle, "attention": middle - before, "block": state - before, "state": state}[
        what
    ]


def partial(what: str, groups: int = 0, only: int | None = None, depths: Sequence[int] = DEPTHS) -> Change:
    """Every rank's chunks hold its own part of a term."""

    def change(rank: int, ranks: int, k: int, values: Floats, held: Tensors) -> Floats:
        if only is not None and k != only:
            return values
        whole = term(held, what, depths[k])
        count = groups or ranks
        return values - whole + parts(whole, count, seed=k)[rank % count]

    return handed(change)


def partial_in_verify(what: str) -> Change:
    """As `partial`, of the rows alone that the target computed in verify passes."""
    spoil = partial(what)

    def apply(rank: int, ranks: int, held: Tensors) -> None:
        right = held["aux"].copy()
        spoil(rank, ranks, held)
        for name in ("aux", "draft.input"):
            held[name][~verified()] = right[~verified()]

    return apply


def verified() -> NDArray[np.bool_]:
    """Which rows of aux are of verify passes: the last quarter of each request, with rejected ones."""
    marks = []
    for tokens in World().requests:
        start, passes = 3 * len(tokens) // 4, len(range(3 * len(tokens) // 4, len(tokens), 3))
        marks.append(np.repeat([False, True], [start, len(tokens) - start + passes]))
    return np.concatenate(marks)


def on_last(change: Callable[[int, Floats, Tensors], Floats]) -> Change:
    """A change of the last rank's chunks."""
    return handed(lambda rank, ranks, k, x, held: change(k, x, held) if rank == ranks - 1 else x)


def noisy(x: Floats, share: float = 0.2) -> Floats:
    rng = np.random.default_rng(len(x))
    return x + share * x * rng.normal(size=x.shape).astype(np.float32)


def some_rows(k: int, x: Floats, held: Tensors) -> Floats:
    x[5:12] = noisy(x, 1.0)[5:12]
    return x


def first_request(k: int, x: Floats, held: Tensors) -> Floats:
    """Rows of the first request, which the source wrote first."""
    x[:30] = noisy(x, 1.0)[:30]
    return x


def stream_from(depth: int, ranks_wrong: Callable[[int, int], bool]) -> Change:
    """The stream of some ranks is another from a depth on, and so is what is handed over."""

    def apply(rank: int, ranks: int, held: Tensors) -> None:
        if ranks_wrong(rank, ranks):
            for d in range(depth, L + 1):
                held[layer(d)] = noisy(held[layer(d)])
                if d < L and mid(d) in held:
                    held[mid(d)] = noisy(held[mid(d)])
            _hand_over(held)

    return apply


def partial_in_stream(what: str, depth: int) -> Change:
    """The model itself leaves a sum out: from there on every rank computes on its own."""

    def apply(rank: int, ranks: int, held: Tensors) -> None:
        whole = term(held, what, depth)
        own = parts(whole, ranks)[rank]
        if what == "attention":
            held[mid(depth - 1)] = held[mid(depth - 1)] - whole + own
        held[layer(depth)] = held[layer(depth)] - whole + own
        for d in range(depth + 1, L + 1):
            held[layer(d)] = noisy(held[layer(d)], 0.1 + 0.05 * rank)
        for k in range(depth, L):
            held[mid(k)] = noisy(held[mid(k)], 0.1 + 0.05 * rank)
        _hand_over(held)

    return apply


def _hand_over(held: Tensors) -> None:
    for k, depth in enumerate(DEPTHS):
        for name in ("aux", "draft.input"):
            if name in held:
                chunk(held[name], k)[:] = held[layer(depth)]


def order_of_sums(rank: int, ranks: int, held: Tensors) -> None:
    """Every sum over ranks rounds otherwise on every rank, and so does all that follows."""
    rng = np.random.default_rng(rank)
    for depth in range(1, L + 1):
        size = 2.0**-9 * np.sqrt(depth)
        held[layer(depth)] *= 1 + size * rng.normal(size=held[layer(depth)].shape).astype(np.float32)
        if mid(depth - 1) in held:
            held[mid(depth - 1)] *= 1 + size * rng.normal(size=held[mid(depth - 1)].shape).astype(np.float32)
    _hand_over(held)


def summed(what: str) -> Change:
    """A term that every rank holds whole, once for each rank."""

    def change(rank: int, ranks: int, k: int, values: Floats, held: Tensors) -> Floats:
        state, middle = held[layer(DEPTHS[k])], held[mid(DEPTHS[k] - 1)]
        whole = {"residual": middle, "mlp": state - middle, "state": state}[what]
        return values + (ranks - 1) * whole

    return handed(change)


def columns(place: Callable[[int, int], int]) -> Change:
    """Every rank holds its share of the columns of each chunk: (rank, ranks) -> which."""

    def apply(rank: int, ranks: int, held: Tensors) -> None:
        width = H // ranks
        start = place(rank, ranks) * width
        for name in ("aux", "draft.input"):
            if name in held:
                values = [chunk(held[name], k)[:, start : start + width] for k in range(len(DEPTHS))]
                held[name] = np.concatenate(values, axis=1)

    return apply


def gathered_across_chunks(rank: int, ranks: int, held: Tensors) -> None:
    """All chunks of the first rank, then all of the next."""
    for name in ("aux", "draft.input"):
        if name in held:
            values = held[name].reshape(len(held[name]), len(DEPTHS), ranks, H // ranks)
            held[name] = np.ascontiguousarray(values.swapaxes(1, 2)).reshape(len(values), -1)


def tokens(pick: Callable[[int, int, int], slice]) -> Keep:
    """Every rank holds some rows of each pass in aux: (rank, ranks, rows of the pass) -> which."""

    def keep(rank: int, ranks: int, name: str, passes: Any) -> Any:
        if name not in ("aux", "draft.input"):
            return None
        rows = [np.flatnonzero(passes == number) for number in np.unique(passes)]
        return np.concatenate([one[pick(rank, ranks, len(one))] for one in rows])

    return keep


def prompt_tokens(pick: Callable[[int, int, int], slice], *sites: str) -> Keep:
    """Of passes of many rows, which are those of prompts, every rank holds some; of others all."""

    def keep(rank: int, ranks: int, name: str, passes: Any) -> Any:
        if name.split("/")[0] not in sites:
            return None
        rows = [np.flatnonzero(passes == number) for number in np.unique(passes)]
        return np.concatenate([one[pick(rank, ranks, len(one))] if len(one) > 12 else one for one in rows])

    return keep


def in_blocks(rank: int, ranks: int, count: int) -> slice:
    part = -(-count // ranks)
    return slice(rank * part, (rank + 1) * part)


def alternating(rank: int, ranks: int, count: int) -> slice:
    return slice(rank, count, ranks)


def last_stage(rank: int, name: str) -> bool:
    """Two stages: depths up to 4, and from 5 on with what feeds the draft."""
    if "/" not in name:
        return rank == 1 if name != "embed" else rank == 0
    number = int(name.split("/")[1])
    return number <= 4 if rank == 0 else number >= 5


def without_early_chunks(rank: int, ranks: int, held: Tensors) -> None:
    for name in ("aux", "draft.input"):
        if name in held:
            held[name] = held[name][:, H:]


def stage(rank: int) -> dict[str, int]:
    return {"pp": rank, "pp_size": 2}
