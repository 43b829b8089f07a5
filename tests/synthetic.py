"""Traces of a small random transformer, with faults to plant.

Shapes: n rows of a request, H channels, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
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
States = dict[Any, Floats]
# A chunk made of the states of one request. [n, H]
Make = Callable[[States], Floats]


def _as(dtype: str, x: Floats) -> Floats:
    """Round to a dtype and come back."""
    if dtype == "float32":
        return x
    rounded: Floats = x.astype(getattr(ml_dtypes, dtype)).astype(np.float32)
    return rounded


def _norm(x: Floats) -> Floats:
    normed: Floats = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6)
    return normed


@cache
def _weights(seed: int, width: int) -> dict[str, Floats]:
    rng = np.random.default_rng(seed)
    spread = 0.9 / np.sqrt(width)
    shapes = {"q": (width, width), "k": (width, width), "v": (width, width), "o": (width, width)}
    shapes |= {"up": (width, 2 * width), "down": (2 * width, width)}
    found = {"embed": rng.normal(size=(VOCAB, width)).astype(np.float32)}
    found["gain"] = rng.uniform(0.5, 1.5, size=width).astype(np.float32)
    for layer in range(L):
        for name in ("in", "post"):
            found[f"{name}{layer}"] = rng.uniform(0.5, 1.5, size=width).astype(np.float32)
        for name, shape in shapes.items():
            found[f"{name}{layer}"] = rng.normal(scale=spread, size=shape).astype(np.float32)
    return found


def forward(
    tokens: Sequence[int],
    dtype: str = "float32",
    width: int = H,
    seed: int = 0,
    changed: Callable[[str, Floats], Floats] | None = None,
) -> States:
    """Residual stream at every depth 0..L and after the final norm, computed in `dtype`. Each [n, H].

    Within layer k, ("mid", k) is the stream after its attention, ("in", k) the output of its first norm.

    Args:
        experts: routed experts that the model says it has.
        changed: what becomes of a weight by its name, as in another checkpoint.
    """
    change = changed or (lambda _, weight: weight)
    w = {name: _as(dtype, change(name, value)) for name, value in _weights(seed, width).items()}
    x = w["embed"][np.asarray(tokens)]
    states: States = {0: x}
    n, d = len(tokens), width // HEADS
    mask = np.triu(np.full((n, n), -1e9, np.float32), 1)
    for layer in range(L):
        h = _as(dtype, _norm(x) * w[f"in{layer}"])
        states["in", layer] = h
        q, k, v = (_as(dtype, h @ w[f"{name}{layer}"]).reshape(n, HEADS, d).swapaxes(0, 1) for name in "qkv")
        scores = q @ k.swapaxes(1, 2) / np.sqrt(d) + mask
        p = np.exp(scores - scores.max(-1, keepdims=True))
        a = ((p / p.sum(-1, keepdims=True)) @ v).swapaxes(0, 1).reshape(n, width)
        x = _as(dtype, x + _as(dtype, _as(dtype, a) @ w[f"o{layer}"]))
        states["mid", layer] = x
        up = _as(dtype, _norm(x) * w[f"post{layer}"]) @ w[f"up{layer}"]
        x = _as(dtype, x + _as(dtype, _as(dtype, np.maximum(up, 0)) @ w[f"down{layer}"]))
        states[layer + 1] = x
    states[FINAL] = _as(dtype, _norm(x) * w["gain"])
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
        changed: what becomes of a weight by its name, as in another checkpoint.
    """

    requests: list[list[int]] = field(default_factory=prompts)
    dtype: str = "float32"
    width: int = H
    seed: int = 0
    loud: bool = False
    sink: bool = False
    shrink: float = 1.0
    experts: int = 0
    changed: Callable[[str, Floats], Floats] | None = None

    def states(self, request: int) -> States:
        found = forward(self.requests[request], self.dtype, self.width, self.seed, self.changed)
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
    makes: Sequence[Make] | None = None,
    tokens_of: Callable[[list[int]], list[int]] | None = None,
) -> Path:
    """A training dump: chunks at `depths` in that order, or `every` depth.

    Args:
        declare: depths to declare; True for the right ones, None for none.
        makes: what the chunks are made of, in place of the states at `depths`.
        tokens_of: the token ids that the dump says were fed, where they are not those that were.
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
            said = tokens_of(tokens) if tokens_of else tokens
            rows = _append_rows(writer, number, said, [_Span(0, len(said), Phase.PREFILL)])
            states = {depth: x[: len(said)] for depth, x in world.states(number).items()}
            if every:
                for depth in [*range(L + 1), FINAL]:
                    name, attrs = _named(depth, "final")
                    _append(writer, name, states[depth], rows, world, spoil, **attrs)
                continue
            parts = [make(states) for make in makes] if makes else [states[d] for d in depths]
            aux = np.concatenate(parts, axis=1)
            declared = list(depths) if declare is True else declare or None
            attrs = {"site": "aux", "chunks": len(depths), "depths": declared}
            _append(writer, "aux", aux, rows, world, spoil, **attrs)
        fed = [tokens_of(tokens) if tokens_of else tokens for tokens in world.requests]
        writer.set_requests([f"t{i}" for i in range(len(fed))], fed, _lengths(world))
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
    makes: Sequence[Make] | None = None,
    graphs: Collection[tuple[int, Phase]] = (),
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
        makes: what the chunks are made of, in place of the states at `depths`.
        graphs: requests and phases of the target that were replayed from a CUDA graph; their passes have
            " graph" after the phase in their mark.
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
                makes,
                [phase for request, phase in graphs if request == number],
            )
        writer.set_requests([f"s{i}" for i in range(len(world.requests))], world.requests, _lengths(world))
    return path


@dataclass(frozen=True)
class _Span:
    """Rows of one pass: positions start..stop of the request, then rejected ones."""

    start: int
    stop: int
    phase: Phase
    rejected: int = 0
    model: Model = Model.TARGET
    graph: bool = False

    @property
    def mark(self) -> str:
        return self.phase.name.lower() + (" graph" if self.graph else "")

    @property
    def rows(self) -> int:
        return self.stop - self.start + self.rejected


def _serve(
    writer: TraceWriter,
    world: World,
    number: int,
    tokens: list[int],
    depths: list[Any],
    sites: Sequence[str],
    spoil: Spoil | None,
    jitter: float,
    decode_depths: list[Any],
    account: bool,
    cached: int,
    makes: Sequence[Make] | None,
    graphs: Sequence[Phase],
) -> None:
    rng = np.random.default_rng(number)
    declared = list(depths)
    states = {d: x[: len(tokens)] for d, x in world.states(number).items()}
    for depth, x in states.items():
        # The embedding is looked up, not computed: it has no rounding of its own.
        if depth != 0:
            states[depth] = x + x * rng.normal(scale=jitter, size=x.shape).astype(np.float32)
    first, second = len(tokens) // 2, 3 * len(tokens) // 4
    spans = [_Span(cached, first, Phase.PREFILL)]
    spans += [_Span(p, p + 1, Phase.DECODE) for p in range(first, second)]
    spans += [_Span(p, min(p + 3, len(tokens)), Phase.VERIFY, 1) for p in range(second, len(tokens), 3)]
    spans = [replace(span, graph=span.phase in graphs) for span in spans]

    def block(depth: Any, span: _Span) -> Floats:
        junk = np.full((span.rejected, world.width), 7.0, np.float32)
        return np.concatenate([states[depth][span.start : span.stop], junk])

    def spoilt(name: str, blocks: list[Floats]) -> list[Floats]:
        if spoil is None:
            return blocks
        marks = [f"{name}@{span.mark}" for span in spans]
        return [spoil(mark, x.copy()) for mark, x in zip(marks, blocks, strict=True)]

    rows = _append_rows(writer, number, tokens, spans)
    if "layer" in sites:
        for depth in [*range(L + 1), FINAL]:
            name, attrs = _named(depth, "logits_processor.input")
            blocks = spoilt(name, [block(depth, span) for span in spans])
            _append(writer, name, np.concatenate(blocks), rows, world, None, **attrs)
    if "mid" in sites:
        for layer in range(L):
            blocks = [block(("mid", layer), span) for span in spans]
            attrs = {"site": "mid", "depth": layer}
            _append(writer, f"mid/{layer:03d}", np.concatenate(blocks), rows, world, None, **attrs)
    for k, make in enumerate(makes or ()):
        # In the dtype of the server, as all that it computes.
        states["chunk", k] = _as(world.dtype, make(states))
    if makes:
        depths = decode_depths = [("chunk", k) for k in range(len(makes))]
    now = [decode_depths if span.phase is Phase.DECODE else depths for span in spans]
    aux = [np.concatenate([block(d, s) for d in ds], axis=1) for ds, s in zip(now, spans, strict=True)]
    aux = spoilt("aux", aux)
    if "aux" in sites:
        said = declared if account else None
        attrs = {"site": "aux", "chunks": len(depths), "depths": said}
        _append(writer, "aux", np.concatenate(aux), rows, world, None, **attrs)
    if "draft.input" in sites:
        rows = _append_rows(writer, number, tokens, [_of_the_draft(span) for span in spans])
        handed = np.concatenate(spoilt("draft.input", aux))
        _append(writer, "draft.input", handed, rows, world, None, site="draft.input", chunks=len(depths))


def _of_the_draft(span: _Span) -> _Span:
    phase = Phase.PREFILL if span.phase is Phase.PREFILL else Phase.DRAFT_EXTEND
    return replace(span, phase=phase, model=Model.DRAFT, graph=False)


def _append_rows(
    writer: TraceWriter, request: int, tokens: list[int], spans: Sequence[_Span]
) -> NDArray[np.int64]:
    """Append the passes of a request and their rows; the indices of the rows, span after span."""
    number = writer.add_passes(
        0,
        {
            "id": [request * 1000 + span.start for span in spans],
            "model": [int(span.model) for span in spans],
            "phase": [int(span.phase) for span in spans],
            "graph": [int(span.graph) for span in spans],
            "mode": [int(CaptureMode.FULL)] * len(spans),
            "n_rows": [span.rows for span in spans],
            "time": [0.0] * len(spans),
        },
    )
    known = context_hashes(tokens)
    columns: dict[str, list[int]] = {
        name: [] for name in ("pass", "request", "position", "token", "context", "status")
    }
    for index, span in enumerate(spans):
        verified = span.phase in (Phase.VERIFY, Phase.DRAFT_EXTEND)
        status = RowStatus.ACCEPTED if verified else RowStatus.PLAIN
        columns["pass"] += [number + index] * span.rows
        columns["request"] += [request] * span.rows
        columns["position"] += range(span.start, span.start + span.rows)
        columns["token"] += [*tokens[span.start : span.stop], *[1] * span.rejected]
        columns["context"] += [*known[span.start : span.stop], *[123456789 + span.start] * span.rejected]
        columns["status"] += [
            *[int(status)] * (span.stop - span.start),
            *[int(RowStatus.REJECTED)] * span.rejected,
        ]
    context = np.array(columns.pop("context"), np.uint64)
    first = writer.append_rows(0, {**columns, "context": context})
    return np.arange(first, first + len(context))


def _named(depth: Any, final: str) -> tuple[str, dict[str, Any]]:
    """Name and attributes of a tensor that holds one depth."""
    if depth == FINAL:
        return final, {"site": final, "depth": "final"}
    return f"layer/{depth:03d}", {"site": "layer", "depth": depth}


def _append(
    writer: TraceWriter,
    name: str,
    x: Floats,
    rows: NDArray[np.int64],
    world: World,
    spoil: Spoil | None,
    **attrs: Any,
) -> None:
    values = spoil(name, x.copy()) if spoil else x
    writer.append(0, name, encode(values, world.dtype), rows, dtype=world.dtype, **attrs)


def _model(world: World, architecture: str) -> dict[str, Any]:
    return {
        "path": "models/target",
        "architecture": architecture,
        "num_layers": L,
        "hidden_size": world.width,
        "dtype": world.dtype,
        "experts": world.experts,
    }


def _lengths(world: World) -> list[int]:
    return [len(tokens) // 2 for tokens in world.requests]
