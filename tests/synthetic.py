"""Traces of a small random transformer, with faults to plant.

Shapes: n rows of a request, H channels, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from hsprobe.trace.context import context_hashes
from hsprobe.trace.schema import CaptureMode, Model, Phase, RowStatus
from hsprobe.trace.writer import TraceWriter

Floats = NDArray[np.float32]
L, H, HEADS, VOCAB = 9, 64, 4, 61
FINAL = "final"
Spoil = Callable[[str, Floats], Floats]


def _as(dtype: str, x: Floats) -> Floats:
    """Round to a dtype and come back."""
    return x if dtype == "float32" else x.astype(getattr(ml_dtypes, dtype)).astype(np.float32)


def _norm(x: Floats) -> Floats:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6)


@cache
def _weights(seed: int, width: int) -> dict[str, Floats]:
    rng = np.random.default_rng(seed)
    spread = 0.9 / np.sqrt(width)
    shapes = {"q": (width, width), "k": (width, width), "v": (width, width), "o": (width, width)}
    shapes |= {"up": (width, 2 * width), "down": (2 * width, width)}
    found = {"embed": rng.normal(size=(VOCAB, width)).astype(np.float32)}
    for layer in range(L):
        for name, shape in shapes.items():
            found[f"{name}{layer}"] = rng.normal(scale=spread, size=shape).astype(np.float32)
    return found


def forward(
    tokens: Sequence[int], dtype: str = "float32", width: int = H, seed: int = 0
) -> dict[Any, Floats]:
    """Residual stream at every depth 0..L and after the final norm, computed in `dtype`. Each [n, H]."""
    w = {name: _as(dtype, value) for name, value in _weights(seed, width).items()}
    x = w["embed"][np.asarray(tokens)]
    states: dict[Any, Floats] = {0: x}
    n, d = len(tokens), width // HEADS
    mask = np.triu(np.full((n, n), -1e9, np.float32), 1)
    for layer in range(L):
        h = _as(dtype, _norm(x))
        q, k, v = (_as(dtype, h @ w[f"{name}{layer}"]).reshape(n, HEADS, d).swapaxes(0, 1) for name in "qkv")
        scores = q @ k.swapaxes(1, 2) / np.sqrt(d) + mask
        p = np.exp(scores - scores.max(-1, keepdims=True))
        a = ((p / p.sum(-1, keepdims=True)) @ v).swapaxes(0, 1).reshape(n, width)
        x = _as(dtype, x + _as(dtype, _as(dtype, a) @ w[f"o{layer}"]))
        up = _as(dtype, _norm(x)) @ w[f"up{layer}"]
        x = _as(dtype, x + _as(dtype, _as(dtype, np.maximum(up, 0)) @ w[f"down{layer}"]))
        states[layer + 1] = x
    states[FINAL] = _as(dtype, _norm(x))
    return states


def prompts(count: int = 4, seed: int = 1) -> list[list[int]]:
    """Token ids of requests of different lengths; 140 to 200 tokens in all."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, size=30 + 7 * i).tolist() for i in range(count)]


@dataclass
class World:
    """What both sides see.

    Attributes:
        loud: a channel 1000 times larger than the rest at every depth but the first.
        sink: the first row of each request 1000 times larger in three channels.
        shrink: scales what the layers add, which makes neighbouring depths alike.
    """

    requests: list[list[int]] = field(default_factory=prompts)
    dtype: str = "float32"
    width: int = H
    seed: int = 0
    loud: bool = False
    sink: bool = False
    shrink: float = 1.0

    def states(self, request: int) -> dict[Any, Floats]:
        found = forward(self.requests[request], self.dtype, self.width, self.seed)
        if self.shrink != 1.0:
            found = {d: found[0] + self.shrink * (x - found[0]) for d, x in found.items()}
        for depth, x in found.items():
            y = x.copy()
            if self.loud and depth != 0:
                y[:, 5] += 1000.0
            if self.sink and depth not in (0, 1):
                y[0, [3, 17, 40]] += [900.0, -1400.0, 1100.0]
            found[depth] = _as(self.dtype, y)
        return found


def encode(x: Floats, dtype: str) -> NDArray[Any]:
    """Values as a trace stores them."""
    if dtype == "bfloat16":
        return x.astype(ml_dtypes.bfloat16).view(np.uint16)
    return x.astype(np.float32)


def write_train(
    path: Path,
    depths: Sequence[int] = (3, 6, 9),
    *,
    world: World | None = None,
    declare: Sequence[int] | bool | None = True,
    every: bool = False,
    spoil: Spoil | None = None,
) -> Path:
    """A training dump: chunks at `depths` in that order, or `every` depth.

    Args:
        declare: depths to declare; True for the right ones, None for none.
    """
    world = world or World()
    provenance = {
        "producer": "transformers",
        "transformers_version": "5.0",
        "model": _model(world, "LlamaForCausalLM"),
    }
    with TraceWriter(path, provenance) as writer:
        writer.add_rank(0, {"tp": 0})
        for number, tokens in enumerate(world.requests):
            rows = _append_rows(writer, number, tokens, 0, len(tokens), Phase.PREFILL)
            states = world.states(number)
            if every:
                for depth in [*range(L + 1), FINAL]:
                    _append_depth(writer, depth, states[depth], rows, world, spoil, final="final")
                continue
            aux = np.concatenate([states[d] for d in depths], axis=1)
            declared = list(depths) if declare is True else declare
            _append(
                writer, "aux", aux, rows, world, spoil, "aux", depths=declared or None, chunks=len(depths)
            )
        writer.set_requests([f"t{i}" for i in range(len(world.requests))], world.requests, _lengths(world))
    return path


def write_infer(
    path: Path,
    depths: Sequence[int] = (3, 6, 9),
    *,
    world: World | None = None,
    ids: Sequence[int] | None = None,
    sites: Sequence[str] = ("aux", "layer", "draft.input"),
    architecture: str = "LlamaForCausalLM",
    spoil: Spoil | None = None,
    keep: int | None = None,
    cached: int = 0,
    provenance: dict[str, Any] | None = None,
    jitter: float = 1e-7,
    decode_depths: Sequence[int] | None = None,
    account: bool = True,
) -> Path:
    """A capture from a server: prefill of the first part of each request, then decode and verify passes.

    Args:
        depths: what the server hands over.
        ids: as written in the draft's config; by default those that ask for `depths` in a Llama.
        keep: only the first rows of each request.
        cached: rows at the beginning that a prefix cache spares the server.
        jitter: relative rounding noise by which the server's states differ from the dump's.
        decode_depths: what it hands over in decode passes, where that differs.
        account: whether the server says which depths it hands over.
    """
    world = world or World()
    known = {
        "producer": "sglang",
        "sglang_version": "0.5.23",
        "model": _model(world, architecture),
        "draft": {
            "path": "models/draft",
            "aux_layer_ids": list(ids) if ids is not None else [d - 1 for d in depths],
        },
        "aux": {"depths": list(depths)},
    } | (provenance or {})
    if not account:
        del known["draft"], known["aux"]
    with TraceWriter(path, known) as writer:
        writer.add_rank(0, {"tp": 0})
        for number, tokens in enumerate(world.requests):
            _serve(
                writer,
                world,
                number,
                tokens[:keep],
                list(depths),
                sites,
                spoil,
                jitter,
                list(decode_depths or depths),
                account,
                cached,
            )
        writer.set_requests([f"s{i}" for i in range(len(world.requests))], world.requests, _lengths(world))
    return path


def _serve(
    writer: TraceWriter,
    world: World,
    number: int,
    tokens: list[int],
    depths: list[int],
    sites: Sequence[str],
    spoil: Spoil | None,
    jitter: float,
    decode_depths: list[int],
    account: bool,
    cached: int,
) -> None:
    rng = np.random.default_rng(number)
    states = {d: x[: len(tokens)] for d, x in world.states(number).items()}
    for depth, x in states.items():
        # The embedding is looked up, not computed: it has no rounding of its own.
        if depth != 0:
            states[depth] = x + x * rng.normal(scale=jitter, size=x.shape).astype(np.float32)
    first, second = len(tokens) // 2, 3 * len(tokens) // 4
    spans = [(cached, first, Phase.PREFILL)]
    spans += [(p, p + 1, Phase.DECODE) for p in range(first, second)]
    spans += [(p, min(p + 3, len(tokens)), Phase.VERIFY) for p in range(second, len(tokens), 3)]
    for start, stop, phase in spans:
        rejected = 1 if phase is Phase.VERIFY else 0
        rows = _append_rows(writer, number, tokens, start, stop, phase, rejected=rejected)
        mark = phase.name.lower()

        def block(depth: Any, start: int = start, stop: int = stop, rejected: int = rejected) -> Floats:
            junk = np.full((rejected, world.width), 7.0, np.float32)
            return np.concatenate([states[depth][start:stop], junk])

        def spoilt(name: str, x: Floats, mark: str = mark) -> Floats:
            return spoil(f"{name}@{mark}", x.copy()) if spoil else x

        if "layer" in sites:
            for depth in [*range(L + 1), FINAL]:
                _append_depth(
                    writer, depth, block(depth), rows, world, spoilt, final="logits_processor.input"
                )
        now = decode_depths if phase is Phase.DECODE else depths
        aux = np.concatenate([block(d) for d in now], axis=1)
        aux = spoilt("aux", aux)
        if "aux" in sites:
            _append(
                writer,
                "aux",
                aux,
                rows,
                world,
                None,
                "aux",
                depths=depths if account else None,
                chunks=len(depths),
            )
        if "draft.input" in sites:
            draft_phase = Phase.PREFILL if phase is Phase.PREFILL else Phase.DRAFT_EXTEND
            draft_rows = _append_rows(
                writer, number, tokens, start, stop, draft_phase, rejected=rejected, model=Model.DRAFT
            )
            handed = spoilt("draft.input", aux)
            _append(writer, "draft.input", handed, draft_rows, world, None, "draft.input", chunks=len(depths))


def _append_rows(
    writer: TraceWriter,
    request: int,
    tokens: list[int],
    start: int,
    stop: int,
    phase: Phase,
    *,
    rejected: int = 0,
    model: Model = Model.TARGET,
) -> NDArray[np.int64]:
    n = stop - start + rejected
    number = writer.add_passes(
        0,
        {
            "id": [request * 1000 + start],
            "model": [int(model)],
            "phase": [int(phase)],
            "mode": [int(CaptureMode.FULL)],
            "n_rows": [n],
            "time": [0.0],
        },
    )
    status = RowStatus.ACCEPTED if phase in (Phase.VERIFY, Phase.DRAFT_EXTEND) else RowStatus.PLAIN
    context = context_hashes(tokens)[start:stop] + [123456789 + start] * rejected
    first = writer.append_rows(
        0,
        {
            "pass": [number] * n,
            "request": [request] * n,
            "position": list(range(start, start + n)),
            "token": tokens[start:stop] + [1] * rejected,
            "context": np.array(context, np.uint64),
            "status": [int(status)] * (stop - start) + [int(RowStatus.REJECTED)] * rejected,
        },
    )
    return np.arange(first, first + n)


def _append_depth(
    writer: TraceWriter,
    depth: Any,
    x: Floats,
    rows: NDArray[np.int64],
    world: World,
    spoil: Spoil | None,
    *,
    final: str,
) -> None:
    if depth == FINAL:
        _append(writer, final, x, rows, world, spoil, final, depth="final")
    else:
        _append(writer, f"layer/{depth:03d}", x, rows, world, spoil, "layer", depth=depth)


def _append(
    writer: TraceWriter,
    name: str,
    x: Floats,
    rows: NDArray[np.int64],
    world: World,
    spoil: Spoil | None,
    site: str,
    **attrs: Any,
) -> None:
    values = spoil(name, x.copy()) if spoil else x
    writer.append(0, name, encode(values, world.dtype), rows, site=site, dtype=world.dtype, **attrs)


def _model(world: World, architecture: str) -> dict[str, Any]:
    return {
        "path": "models/target",
        "architecture": architecture,
        "num_layers": L,
        "hidden_size": world.width,
        "dtype": world.dtype,
    }


def _lengths(world: World) -> list[int]:
    return [len(tokens) // 2 for tokens in world.requests]
