"""Choose what to compare: which tensors are training chunks, served chunks, candidates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hsprobe.compare.direct import Lane
from hsprobe.compare.noise import coarsest, routes_by_rounding
from hsprobe.compare.stack import Stack, stacks_of
from hsprobe.diagnose.evidence import Serving
from hsprobe.diagnose.identify import Candidate, Label
from hsprobe.diagnose.model import Depth, SideSummary
from hsprobe.errors import HsprobeError
from hsprobe.formats.sglang_ids import depths_of
from hsprobe.trace.reader import Trace

_CHUNKED = ("aux", "draft.input")
_FINAL = ("final", "logits_processor.input")


@dataclass
class Side:
    """One trace: its stacks and what is known of its model.

    Attributes:
        hidden: H, width of the residual stream.
    """

    trace: Trace
    stacks: dict[str, Stack]
    hidden: int
    num_layers: int | None
    model_dtype: str | None

    @property
    def layers(self) -> dict[Depth, Lane]:
        """Depth -> the tensor that holds it, for depths taken from the stream itself."""
        found: dict[Depth, Lane] = {}
        for stack in self.stacks.values():
            if stack.width != self.hidden:
                continue
            if stack.tensor.site == "layer" or stack.name.startswith("layer/"):
                if isinstance(stack.depth, int):
                    found[stack.depth] = Lane(stack, self.hidden, depth=stack.depth)
            elif stack.name in _FINAL and len(stack.keys.usable):
                found.setdefault("final", Lane(stack, self.hidden, depth="final"))
        if "embed" in self.stacks and self.stacks["embed"].width == self.hidden:
            found.setdefault(0, Lane(self.stacks["embed"], self.hidden, depth=0))
        return found

    @property
    def architecture(self) -> str | None:
        """The model's class, where it is recorded."""
        known = _model(self.trace.provenance).get("architecture")
        return known if isinstance(known, str) and known else None

    @property
    def mids(self) -> dict[int, Lane]:
        """Layer -> the tensor that holds the stream after its attention and before its MLP."""
        return {
            stack.depth: Lane(stack, self.hidden)
            for stack in self.stacks.values()
            if stack.tensor.site == "mid" and isinstance(stack.depth, int) and stack.width == self.hidden
        }

    def chunked(self, prefer: str = "aux") -> Stack | None:
        """The tensor made of chunks, `prefer` first."""
        for name in sorted(_CHUNKED, key=lambda name: name != prefer):
            if name in self.stacks:
                return self.stacks[name]
        return None

    def summary(self) -> SideSummary:
        provenance = self.trace.provenance
        version = provenance.get(f"{provenance.get('producer')}_version")
        producer = str(provenance.get("producer") or "unknown producer")
        dump = provenance.get("dump")
        if isinstance(dump, dict) and dump.get("format"):
            producer = str(dump["format"])
        some = next(iter(self.stacks.values()))
        return SideSummary(
            path=str(self.trace.path),
            producer=f"{producer} {version}" if version else producer,
            architecture=_model(provenance).get("architecture"),
            num_layers=self.num_layers,
            hidden_size=self.hidden,
            dtype=some.dtype,
            state=self.trace.state,
            gaps=len(self.trace.gaps),
        )


def open_side(
    trace: Trace, side: str, stacks: Mapping[str, Stack] | None = None, hidden: int | None = None
) -> Side:
    """Look through a trace.

    Args:
        stacks: the tensors to look at; by default those of all ranks, as one.
        hidden: H, where it is known.

    Raises:
        HsprobeError: nothing was captured.
    """
    given = stacks_of(trace, side) if stacks is None else stacks
    stacks = {name: stack for name, stack in given.items() if len(stack.keys.usable)}
    if not stacks:
        raise HsprobeError(
            f"{trace.path} holds no row that could be compared: nothing was captured.",
            "Send prompts while capturing and check with 'hsprobe inspect' that rows arrive.",
        )
    model = _model(trace.provenance)
    layers, experts = model.get("num_layers"), model.get("experts")
    for stack in stacks.values():
        stack.routed = isinstance(experts, int) and routes_by_rounding(
            experts, model.get("dtype"), stack.dtype
        )
    return Side(
        trace,
        stacks,
        hidden or _hidden(trace, stacks),
        layers if isinstance(layers, int) and layers > 0 else None,
        model.get("dtype") if isinstance(model.get("dtype"), str) else None,
    )


def check_same_model(train: Side, infer: Side) -> None:
    """Raise HsprobeError if the widths show that the traces come from different models, or are none."""
    for side in (train, infer):
        for name in _CHUNKED:
            if name in side.stacks and side.stacks[name].width % side.hidden:
                raise HsprobeError(
                    f"{name} in {side.trace.path} is {side.stacks[name].width} wide, which is no multiple of "
                    f"the hidden size {side.hidden}.",
                    "Check that the capture and its model agree, and capture again.",
                )
    if train.hidden != infer.hidden:
        raise HsprobeError(
            f"The hidden states of {train.trace.path} are {train.hidden} wide, those of {infer.trace.path} "
            f"{infer.hidden}: they are traces of different models.",
            "Compare a training dump and a capture of the same target model.",
        )


def chunk_lanes(stack: Stack | None, hidden: int) -> list[Lane]:
    """The chunks of a stack, with the depths its producer declares."""
    if stack is None:
        return []
    declared: Sequence[Depth] = stack.tensor.depths or []
    count = max(1, stack.width // hidden)
    if len(declared) != count:
        declared = [None] * count
    if count == 1 and declared == [None]:
        declared = [stack.depth]
    return [Lane(stack, hidden, chunk=k, depth=declared[k]) for k in range(count)]


def served_depths(serving: Serving, stack: Stack | None, count: int) -> list[Depth]:
    """The depths the server says its chunks have, None where it does not say."""
    known: list[int] | None = serving.aux_depths
    if known is None and serving.draft_named and serving.num_layers and serving.producer == "sglang":
        known = depths_of(serving.architecture, serving.ids, serving.num_layers, serving.version)
    if known is None and stack is not None:
        known = stack.tensor.depths
    # SGLang hands the chunks over in ascending depth, each depth once, whatever order it was given them in.
    if known is not None and serving.producer == "sglang":
        known = sorted(set(known))
    return list(known) if known is not None and len(known) == count else [None] * count


def depth_candidates(*sides: Side) -> list[Candidate]:
    """Every depth and `final` of the given sides."""
    found: list[Candidate] = []
    for side in sides:
        found += [Candidate(Label.of(depth), lane) for depth, lane in side.layers.items()]
    return found


def dtypes_between(train: Side, infer: Side, *stacks: Stack | None) -> tuple[str, str]:
    """The coarsest precision on each side: storage of its stacks, and what its model computed in."""
    return _dtype_of(train, "train", *stacks), _dtype_of(infer, "infer", *stacks)


def _dtype_of(side: Side, name: str, *stacks: Stack | None) -> str:
    return coarsest(side.model_dtype, *(s.dtype for s in stacks if s is not None and s.side == name))


def _hidden(trace: Trace, stacks: dict[str, Stack]) -> int:
    for name, stack in stacks.items():
        if name.startswith("layer/") or name in (*_FINAL, "embed"):
            return stack.width
    for name in _CHUNKED:
        if name in stacks:
            tensor = stacks[name].tensor
            chunks = tensor.chunks or len(tensor.depths or [])
            if chunks > 0 and tensor.shape[1] % chunks == 0:
                return int(tensor.shape[1]) // chunks
    declared = _model(trace.provenance).get("hidden_size")
    if isinstance(declared, int) and declared > 0:
        return declared
    return next(iter(stacks.values())).width


def _model(provenance: dict[str, Any]) -> dict[str, Any]:
    model = provenance.get("model")
    return model if isinstance(model, dict) else {}
