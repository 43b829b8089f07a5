"""Matrices that no hypothesis names: are the outputs still a linear map of the inputs, and of which kind?

Shapes: n rows, i inputs, o outputs, b input blocks.
"""

from __future__ import annotations

import numpy as np

from hsprobe.compare.noise import MEDIAN_ALLOWANCE
from hsprobe.compare.statistics import Floats, row_errors
from hsprobe.diagnose.draft.compute import Computer, Variant
from hsprobe.diagnose.draft.model import Verdict
from hsprobe.diagnose.draft.trial import Errors, Stage, Trier
from hsprobe.diagnose.wording import figure

_BLOCK = 128
_LEAST = 1.25
"""Rows for each unknown of a fit, so that a fit says something."""
_HELD_OUT = 4
_INPUT = {
    "draft.qkv": "draft.mixed",
    "draft.attention": "draft.context",
    "draft.logits": "draft.final",
}
_NAMES = {
    "draft.fc": "fc",
    "draft.qkv q": "layers.0.self_attn.q_proj",
    "draft.qkv k": "layers.0.self_attn.k_proj",
    "draft.qkv v": "layers.0.self_attn.v_proj",
    "draft.attention": "layers.0.self_attn.o_proj",
    "draft.gate_up gate": "layers.0.mlp.gate_proj",
    "draft.gate_up up": "layers.0.mlp.up_proj",
    "draft.layer": "layers.0.mlp.down_proj",
    "draft.logits": "lm_head",
}


def verdict(stage: Stage, errors: Errors, between: list[str], trier: Trier) -> Verdict | None:
    """What a fit says of the one matrix before a stage; None where it says nothing."""
    name = _NAMES.get(stage.name)
    if name is None or between != [stage.site]:
        return None
    inputs_ni, outputs_no, base_no = _sides(stage, trier)
    ref = trier.material.ref
    weight_oi = (ref.head if name == "lm_head" else ref.weights[f"{name}.weight"]).float().numpy()
    short = name.rsplit(".", 1)[-1]
    steps = [
        f"Look at {short} in the checkpoint and at how it is loaded (name, dtype, quantisation, sharding)."
    ]

    def told(title: str, left: float, proof: str) -> Verdict:
        return Verdict(
            "weights",
            stage.name,
            title,
            steps=steps,
            proof=[
                f"{stage.name}: error {figure(errors.median)} against the checkpoint, {figure(left)} so; "
                f"expected {figure(stage.expected)} or less",
                proof,
            ],
            error=left,
            before=errors.median,
            agree=int(errors.over.sum()),
            rows=len(errors.finite),
        )

    limit = MEDIAN_ALLOWANCE * stage.expected
    scaled = _scaled(inputs_ni, outputs_no, weight_oi)
    if scaled is not None:
        left = _left(scaled[0] + base_no, stage)
        if left <= limit:
            low, high = scaled[1]
            return told(
                f"the draft's {short} is scaled, block by block of {_BLOCK}: by {low:.3g} to {high:.3g}",
                left,
                "a quantised matrix whose scales were not applied, or applied twice, looks like this",
            )
    fitted = _fitted(inputs_ni, outputs_no)
    if fitted is not None:
        rows, guess = fitted
        left = float(np.median(row_errors(stage.captured[rows], guess + base_no[rows], stage.scale)))
        if left <= max(limit, 0.02 * errors.median):
            return told(
                f"the draft's {short} holds other values than the checkpoint's: it was not loaded",
                left,
                "a matrix fitted to some rows gives the others, so the input is right and the values are not",
            )
    return None


def _sides(stage: Stage, trier: Trier) -> tuple[Floats, Floats, Floats]:
    """Input and output of the matrix, and what is added to its output. [n, i], [n, o], [n, o]"""
    computer = Computer(trier.material, Variant(trier.material.ref), trier.seen)
    index = stage.index
    base = np.zeros_like(stage.captured)
    if stage.site == "draft.fc":
        config, ref = trier.material.ref.config, trier.material.ref
        x = trier.material.read("draft.input", index)
        inputs = ref.pre_fc(x) if x.shape[-1] == config.aux_width else x
    elif stage.site == "draft.gate_up":
        stream = computer.fused(index) + computer.get("draft.attention", index)
        inputs = trier.material.ref.rms_norm(stream, "layers.0.post_attention_layernorm.weight")
    elif stage.site == "draft.layer":
        gate, up = computer.get("draft.gate_up", index).chunk(2, dim=-1)
        inputs = gate * gate.sigmoid() * up
        base = (computer.fused(index) + computer.get("draft.attention", index)).numpy()
    else:
        inputs = computer.get(_INPUT[stage.site], index)
    return inputs.numpy(), stage.captured - base, base


def _left(guess_no: Floats, stage: Stage) -> float:
    return float(np.median(row_errors(stage.captured, guess_no, stage.scale)))


def _scaled(
    inputs_ni: Floats, outputs_no: Floats, weight_oi: Floats
) -> tuple[Floats, tuple[float, float]] | None:
    """The outputs under the factor of every block that fits best, and the range of factors."""
    n, width = inputs_ni.shape
    blocks = [slice(k, min(k + _BLOCK, width)) for k in range(0, width, _BLOCK)]
    guess, factors = np.empty_like(outputs_no), []
    for low in range(0, len(weight_oi), _BLOCK):
        out = slice(low, min(low + _BLOCK, len(weight_oi)))
        parts_bno = np.stack([inputs_ni[:, b] @ weight_oi[out, b].T for b in blocks])
        columns = parts_bno.reshape(len(blocks), -1).T
        if len(columns) < _LEAST * len(blocks):
            return None
        found, *_ = np.linalg.lstsq(columns, outputs_no[:, out].reshape(-1), rcond=None)
        factors.append(found)
        guess[:, out] = (columns @ found).reshape(n, -1)
    every = np.concatenate(factors)
    return guess, (float(every.min()), float(every.max()))


def _fitted(inputs_ni: Floats, outputs_no: Floats) -> tuple[np.ndarray, Floats] | None:
    """Rows held out of a fit of the matrix, and their outputs under it."""
    n, width = inputs_ni.shape
    held = np.arange(n) % _HELD_OUT == 0
    if (~held).sum() < _LEAST * width:
        return None
    found, *_ = np.linalg.lstsq(
        inputs_ni[~held].astype(np.float64), outputs_no[~held].astype(np.float64), rcond=None
    )
    return np.flatnonzero(held), (inputs_ni[held] @ found).astype(np.float32)
