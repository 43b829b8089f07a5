"""What a target's parts are given and give, beside what the probes take there, for `proof`.

Each of these is in place only while the target's first passes are looked at.
"""

from __future__ import annotations

from typing import Any

import torch

from hsprobe.probes.sglang.identity import ROWS, Sample
from hsprobe.probes.sglang.recorder import Recorder

NORM_OF = {"prepare_attn": "input_layernorm", "prepare_mlp": "post_attention_layernorm"}
"""Of a ``LayerCommunicator``: which of its norms a method ends with (``layers/communicator.py``)."""

Handed = tuple[Sample | None, Sample | None]
"""The state before, and what is to be added to it."""


def handed(recorder: Recorder, hidden: Any, batch: Any) -> Handed:
    """What a stage of SGLang 0.5.23 is about to add; None for a sum over ranks that is still to be taken.

    ``layers/layer_boundary/residual/stream.py:ResidualStream`` and ``Contribution``.
    """
    found: list[Handed] = []

    def look() -> None:
        stream = batch.residual_stream
        pending = stream.pending
        before = Sample.of(stream.residual)
        if pending is None:
            found.append((None, Sample.of(hidden)) if before is None else (before, None))
        elif pending.owed is None and pending.update.is_plain_add:
            found.append((before, Sample.of(pending.value)))
        else:
            found.append((before, None))

    recorder.guard("proof", look)
    return found[0] if found else (None, None)


class StageWitness:
    """Around a stage's ``prepare``, outside the probe's hook (``layer_boundary/stage.py:StageBoundary``)."""

    def __init__(self, recorder: Recorder, boundary: Any, site: str, depth: int) -> None:
        self._recorder = recorder
        self._boundary = boundary
        self._place = site, depth
        self._prepare: Any = None

    def begin(self) -> None:
        """Put it in place, on this one stage."""
        self._prepare = self._boundary.prepare
        self._boundary.prepare = self._seen

    def end(self) -> None:
        """Take it away: the stage is as it was."""
        vars(self._boundary).pop("prepare", None)

    def _seen(self, hidden: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._recorder.proof.active:
            return self._prepare(hidden, batch, *args, **kwargs)
        before = handed(self._recorder, hidden, batch)
        result = self._prepare(hidden, batch, *args, **kwargs)
        norm = getattr(self._boundary, "norm", None)
        self._recorder.guard("proof", lambda: self._recorder.proof.part(*self._place, *before, result, norm))
        return result


class PreparedWitness:
    """Around a communicator's ``prepare_attn`` or ``prepare_mlp``, outside the probe's hook.

    Args:
        alone: whether no other rank holds a part of the sum that the communicator takes first.
    """

    def __init__(
        self, recorder: Recorder, communicator: Any, method: str, site: str, depth: int, alone: bool
    ) -> None:
        self._recorder = recorder
        self._communicator, self._method = communicator, method
        self._norm = getattr(communicator, NORM_OF[method], None)
        self._place = site, depth
        self._alone = alone
        self._prepare: Any = None

    def begin(self) -> None:
        """Put it in place, on this one communicator."""
        self._prepare = getattr(self._communicator, self._method)
        setattr(self._communicator, self._method, self._seen)

    def end(self) -> None:
        """Take it away: the communicator is as it was."""
        vars(self._communicator).pop(self._method, None)

    def _seen(self, *args: Any, **kwargs: Any) -> Any:
        if not self._recorder.proof.active:
            return self._prepare(*args, **kwargs)
        given = dict(zip(("hidden_states", "residual"), args, strict=False)) | kwargs
        hidden, residual = given.get("hidden_states"), given.get("residual")
        before = before_norm(self._recorder, hidden, residual, alone=self._alone)
        result = self._prepare(*args, **kwargs)
        proof = self._recorder.proof
        self._recorder.guard("proof", lambda: proof.part(*self._place, *before, result[0], self._norm))
        return result


class NormWitness:
    """Around a norm that adds what it is given to the residual, outside the probe's hook.

    Args:
        final: whether it is the target's last.
        alone: as of `PreparedWitness`.
    """

    def __init__(
        self, recorder: Recorder, norm: torch.nn.Module, site: str, depth: int, *, alone: bool, final: bool
    ) -> None:
        self._recorder = recorder
        self._norm = norm
        self._place = site, depth
        self._alone, self._final = alone, final
        self._before: Handed = (None, None)
        self._handles: list[Any] = []

    def begin(self) -> None:
        """Put it in place; the probe's own hook is there before it."""
        self._handles = [
            self._norm.register_forward_pre_hook(self._given),
            self._norm.register_forward_hook(self._seen),
        ]

    def end(self) -> None:
        """Take it away."""
        for handle in self._handles:
            handle.remove()

    def _given(self, module: torch.nn.Module, args: Any) -> None:
        if self._recorder.proof.active:
            # The norm may work in place.
            hidden, residual = (*args, None, None)[:2]
            self._before = before_norm(self._recorder, hidden, residual, alone=self._alone)

    def _seen(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if not self._recorder.proof.active:
            return
        normed = output[0] if isinstance(output, tuple) else output

        def tell() -> None:
            self._recorder.proof.part(*self._place, *self._before, normed, module)
            if self._final:
                self._recorder.proof.final(normed)

        self._recorder.guard("proof", tell)


def before_norm(recorder: Recorder, hidden: Any, residual: Any, *, alone: bool) -> Handed:
    """What a norm up to SGLang 0.5.22 is about to add: the first of a forward is given no residual."""
    found: list[Handed] = []

    def look() -> None:
        branch = Sample.of(hidden) if alone or residual is None else None
        found.append((Sample.of(residual), branch))

    recorder.guard("proof", look)
    return found[0] if found else (None, None)


class EmbeddingWitness:
    """Beside an embedding: a row of its weights for each token, as far as this rank has them."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._handle: Any = None

    def attach(self, module: torch.nn.Module) -> None:
        """Have a target's embedding watched."""
        self._recorder.proof.expect("embed", compared=True)
        self._recorder.proof.watch(lambda: self._begin(module), self._end)

    def _begin(self, module: torch.nn.Module) -> None:
        self._handle = module.register_forward_hook(self._seen)

    def _end(self) -> None:
        self._handle.remove()

    def _seen(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self._recorder.proof.active:
            self._recorder.guard("proof", lambda: self._compare(module))

    def _compare(self, module: Any) -> None:
        current = self._recorder.under_way
        weight = getattr(module, "weight", None)
        if current is None or current.ids is None or not isinstance(weight, torch.Tensor):
            return
        expected = looked_up(weight, current.ids, getattr(module, "shard_indices", None))
        self._recorder.proof.same("embed", expected, "it is not the embedding's row for each token")


def looked_up(weight_VH: torch.Tensor, ids_T: torch.Tensor, shard: Any) -> Sample | None:
    """Rows of the weights for the first tokens; NaN for tokens that another rank has."""
    if weight_VH.ndim != 2 or not weight_VH.is_floating_point():
        return None
    first = int(getattr(shard, "org_vocab_start_index", 0))
    last = int(getattr(shard, "org_vocab_end_index", weight_VH.shape[0]))
    ids = ids_T[:ROWS].to(torch.int64)
    mine = (ids >= first) & (ids < last)
    rows_RH = weight_VH[(ids - first).clamp(0, weight_VH.shape[0] - 1)].detach().clone()
    rows_RH[~mine] = float("nan")
    return Sample(rows_RH, int(ids_T.shape[0]))
