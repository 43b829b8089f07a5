"""Faults planted in synthetic traces, each with the codes that must come out: these and no others.

Shapes: n rows of a request or a pass, H channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tests.synthetic import (
    FINAL,
    Floats,
    H,
    Make,
    Spoil,
    States,
    World,
    _norm,
    _weights,
    prompts,
    write_infer,
    write_train,
)

DEPTHS = (3, 6, 8)
SITES = ("aux", "layer", "mid", "draft.input")


@dataclass
class Case:
    """One comparison.

    Attributes:
        codes: what must be named, sorted.
        trained: depths of the dump. made, dumped: what the served and the training chunks are made of.
        server, dump: the worlds of either side; `train`, `infer`: more arguments of the writers.
    """

    name: str
    codes: str
    trained: Sequence[int] = DEPTHS
    made: Sequence[Make] | None = None
    dumped: Sequence[Make] | None = None
    server: dict[str, Any] = field(default_factory=dict)
    dump: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    infer: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path, dtype: str, sites: Sequence[str] = SITES) -> tuple[Path, Path]:
        """The two traces."""
        server = World(**{"dtype": dtype, **self.server})
        dump = World(**{"dtype": dtype, **self.dump})
        train = {"world": dump, "makes": self.dumped, **self.train}
        infer = {"world": server, "sites": sites, "makes": self.made, **self.infer}
        return (
            write_train(folder / "t.h5", self.trained, **train),
            write_infer(folder / "i.h5", infer.pop("depths", sorted(self.trained)), **infer),
        )


# What chunks are made of


def at(depth: int | str) -> Make:
    """The state itself."""
    return lambda s: s[depth]


def no_mlp(d: int) -> Make:
    return lambda s: s["mid", d - 1]


def no_attention(d: int) -> Make:
    return lambda s: s[d] - (s["mid", d - 1] - s[d - 1])


def mlp_alone(d: int) -> Make:
    return lambda s: s[d] - s["mid", d - 1]


def block_alone(d: int) -> Make:
    return lambda s: s[d] - s[d - 1]


def residual_twice(d: int) -> Make:
    return lambda s: s[d] + s["mid", d - 1]


def scaled(d: int, factor: float) -> Make:
    return lambda s: s[d] * np.float32(factor)


def mlp_times(d: int, n: float) -> Make:
    return lambda s: s[d] + np.float32(n - 1) * (s[d] - s["mid", d - 1])


def attention_times(d: int, n: float) -> Make:
    return lambda s: s[d] + np.float32(n - 1) * (s["mid", d - 1] - s[d - 1])


def next_attention(d: int) -> Make:
    return lambda s: s["mid", d]


def next_norm(d: int) -> Make:
    return lambda s: s["in", d]


def final_norm(d: int) -> Make:
    gain = _weights(0, H)["gain"]
    return lambda s: _norm(s[d]) * gain


def noisy(d: int, share: float) -> Make:
    def make(s: States) -> Floats:
        x = s[d]
        return x + share * x * np.random.default_rng(len(x)).normal(size=x.shape).astype(np.float32)

    return make


def rotated(d: int) -> Make:
    """An isometry: nothing that hsprobe tries is one."""
    turn = np.linalg.qr(np.random.default_rng(3).normal(size=(H, H)))[0].astype(np.float32)
    return lambda s: s[d] @ turn


def moved(d: int, offset: int) -> Make:
    """State of the position `offset` on; the ends repeat."""

    def make(s: States) -> Floats:
        x = s[d]
        return x[np.clip(np.arange(len(x)) + offset, 0, len(x) - 1)]

    return make


# What befalls rows, pass by pass


def on_aux(change: Callable[[str, Floats], Floats]) -> Spoil:
    return lambda name, x: change(name.split("@")[1], x) if name.startswith("aux@") else x


def previous_pass() -> Spoil:
    kept: dict[str, Floats] = {}

    def change(phase: str, x: Floats) -> Floats:
        before = kept.get(phase)
        kept[phase] = x.copy()
        if before is None:
            return x
        size = min(len(x), len(before))
        return np.concatenate([before[:size], x[size:]])

    return on_aux(change)


def one_row() -> Spoil:
    return on_aux(lambda _, x: np.repeat(x[:1], len(x), axis=0))


def unwritten() -> Spoil:
    return on_aux(lambda phase, x: np.concatenate([x[:1], 0 * x[1:]]) if phase != "decode" else 0 * x)


def holes() -> Spoil:
    def change(_: str, x: Floats) -> Floats:
        x[::5] = np.nan
        return x

    return on_aux(change)


# Other checkpoints, other tokens


def rounded(bits: int) -> Callable[[str, Floats], Floats]:
    """Matrices of the layers rounded to so many bits, a scale a group of 32."""
    top = 2 ** (bits - 1) - 1

    def change(name: str, w: Floats) -> Floats:
        if w.ndim < 2 or name == "embed":
            return w
        groups = w.T.reshape(-1, 32)
        scale = np.abs(groups).max(axis=1, keepdims=True) / top
        back: Floats = (np.round(groups / scale) * scale).reshape(w.T.shape).T.astype(np.float32)
        return back

    return change


def trained_further(name: str, w: Floats) -> Floats:
    """Every weight a little off."""
    rng = np.random.default_rng(len(name))
    return w + np.float32(0.1) * w.std() * rng.normal(size=w.shape).astype(np.float32)


def one_layer_off(name: str, w: Floats) -> Floats:
    return w * np.float32(1.5) if name == "down4" else w


def to_fp8(_: str, x: Floats) -> Floats:
    return x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)


def with_placeholders() -> list[list[int]]:
    found = prompts()
    for tokens in found:
        tokens[:] = [token if token != 5 else 6 for token in tokens]
        tokens[8:14] = [5] * 6
    return found


def image_rows(d: int) -> Make:
    """A feature added where the token is the placeholder; the request is known by its length."""
    feature = np.random.default_rng(1).normal(size=H).astype(np.float32)

    def make(s: States) -> Floats:
        x = s[d].copy()
        x[8:14] += feature
        return x

    return make


def other_token() -> list[list[int]]:
    found = prompts()
    for tokens in found:
        tokens[9] = (tokens[9] + 1) % 61
    return found


def first_twice() -> list[list[int]]:
    return [[tokens[0], *tokens] for tokens in prompts()]


def others_rows() -> Spoil:
    """Each request of the dump gets the rows of the one before it, cut or filled up."""
    kept: list[Floats] = []

    def spoil(_: str, x: Floats) -> Floats:
        kept.append(x.copy())
        source = kept[len(kept) - 2] if len(kept) > 1 else x
        return source[np.minimum(np.arange(len(x)), len(source) - 1)] if len(kept) > 1 else x

    return spoil


CASES = [
    Case("next layer", "HS101", made=[at(4), at(7), at(9)]),
    Case("embedding first", "HS102", made=[at(0), at(6), at(8)]),
    Case("chunks exchanged", "HS104", trained=(8, 6, 3), made=[at(3), at(6), at(8)]),
    Case("final norm on the last", "HS201", (3, 6, 9), made=[at(3), at(6), at(FINAL)]),
    Case("final norm on all", "HS201", made=[final_norm(d) for d in DEPTHS]),
    Case("dump after the final norm", "HS201", (3, 6, 9), dumped=[at(3), at(6), at(FINAL)],
         made=[at(3), at(6), at(9)]),
    Case("MLP output alone", "HS202", made=[mlp_alone(d) for d in DEPTHS]),
    Case("layer output alone", "HS202", made=[at(3), block_alone(6), at(8)]),
    Case("residual twice", "HS202", made=[residual_twice(d) for d in DEPTHS]),
    Case("doubled", "HS202", made=[scaled(d, 2) for d in DEPTHS]),
    Case("dump without residual", "HS202", dumped=[block_alone(d) for d in DEPTHS]),
    Case("next norm in place", "HS203", made=[at(3), next_norm(6), at(8)]),
    Case("next attention added", "HS203", made=[next_attention(d) for d in DEPTHS]),
    Case("MLP twice", "HS204", made=[mlp_times(d, 2) for d in DEPTHS]),
    Case("MLP four times", "HS204", made=[at(3), mlp_times(6, 4), at(8)]),
    Case("attention twice", "HS204", made=[attention_times(d, 2) for d in DEPTHS]),
    Case("half of the MLP", "HS204", made=[mlp_times(d, 0.5) for d in DEPTHS]),
    Case("embedding scaled", "HS204", (0, 6, 8), made=[scaled(0, 11.3), at(6), at(8)]),
    Case("MLP missing", "HS205", made=[no_mlp(d) for d in DEPTHS]),
    Case("attention missing", "HS205", made=[at(3), at(6), no_attention(8)]),
    *(Case(f"rows {o:+}", "HS301", made=[moved(d, o) for d in DEPTHS]) for o in (-2, -1, 1, 2)),
    *(Case(f"rows of the dump {o:+}", "HS301", dumped=[moved(d, o) for d in DEPTHS]) for o in (-1, 1)),
    Case("previous pass", "HS302", infer={"spoil": previous_pass()}),
    Case("one row repeated", "HS302", infer={"spoil": one_row()}),
    Case("rows never written", "HS302", infer={"spoil": unwritten()}),
    Case("dump of other requests", "HS303", train={"spoil": others_rows()}),
    Case("other depths in decode", "HS304", infer={"decode_depths": (2, 5, 6)}),
    Case("another token", "HS401", dump={"requests": other_token()}),
    Case("first token twice", "HS401", dump={"requests": first_twice()}),
    Case("ids of the dump shifted", "HS402", train={"tokens_of": lambda tokens: tokens[1:]}),
    Case(
        "image rows", "HS403", made=[image_rows(d) for d in DEPTHS],
        server={"requests": with_placeholders()}, dump={"requests": with_placeholders()},
    ),
    Case("NaN", "HS502", infer={"spoil": holes()}),
    Case("4-bit weights", "HS501", server={"changed": rounded(4)}),
    Case("other weights", "HS503", server={"changed": trained_further}, train={"every": True}),
    Case("one layer off", "HS504", server={"changed": one_layer_off}, train={"every": True}),
    Case("a rotation", "HS599", made=[at(3), rotated(6), at(8)]),
]  # fmt: skip

PAIRS = [
    Case("one low and exchanged", "HS101 HS104", trained=(8, 6, 3), made=[at(2), at(5), at(7)]),
    Case("one low and normed", "HS101 HS203", made=[next_norm(d - 1) for d in DEPTHS]),
    Case("one low and the last normed", "HS101 HS201", (3, 6, 9), made=[at(2), at(5), at(FINAL)]),
    Case("one high and rows late", "HS101 HS301", (3, 6, 7), made=[moved(d + 1, -1) for d in (3, 6, 7)]),
    Case("exchanged and dump rows late", "HS104 HS301", (8, 6, 3), dumped=[moved(d, -1) for d in (8, 6, 3)],
         made=[at(3), at(6), at(8)]),
    Case("exchanged and no residual", "HS104 HS202", made=[at(6), at(3), block_alone(8)]),
    Case("a wrong layer and no residual", "HS102 HS202", made=[at(0), block_alone(6), at(8)]),
    Case("one low and NaN", "HS101 HS502", made=[at(2), at(5), at(7)], infer={"spoil": holes()}),
    Case("one low in a dump of other tokens", "HS101 HS401", dump={"requests": other_token()},
         made=[at(2), at(5), at(7)]),
    Case("rows late and normed", "HS203 HS301",
         made=[lambda s, d=d: np.concatenate([s["in", d][:1], s["in", d][:-1]]) for d in DEPTHS]),
    Case("one low in 4 bits", "HS101 HS501", server={"changed": rounded(4)}, made=[at(2), at(5), at(7)]),
]  # fmt: skip

# Nothing here is a fault.
BENIGN = [
    Case("nothing", ""),
    Case("alike neighbours", "", server={"shrink": 0.05}, dump={"shrink": 0.05}),
    Case("loud and sink", "", server={"loud": True, "sink": True}, dump={"loud": True, "sink": True}),
    Case("more requests", "", server={"requests": [*prompts(), *prompts(3, seed=9)]}),
    Case("one repeated", "", server={"requests": prompts() * 2}),
    Case("other order", "", server={"requests": prompts()[::-1]}),
    Case("prefix cache", "", infer={"cached": 8}),
    Case("cut short", "", infer={"keep": 25}),
    Case("a model of every depth", "", train={"every": True}),
    Case("undeclared", "", train={"declare": None}),
]
