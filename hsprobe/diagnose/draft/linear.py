"""Matrices that no hypothesis names: are the outputs still a linear map of the inputs, and of which kind?

Shapes: n rows, i inputs, o outputs, b input blocks.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from hsprobe.compare.noise import MEDIAN_ALLOWANCE
from hsprobe.compare.statistics import Floats, row_errors
from hsprobe.diagnose.draft.compute import Computer, Variant, computable
from hsprobe.diagnose.draft.model import Verdict
from hsprobe.diagnose.draft.trial import Errors, Stage, Trier, stages
from hsprobe.diagnose.wording import figure

_BLOCK = 128
_LEAST = 1.25
"""Rows for each unknown of a fit, so that a fit says something."""
_HELD_OUT = 4
_MOST = 4096
_WIDEST = 2048
"""Inputs up to which a matrix is fitted at all."""
_ALONE, _NEARLY_ALL = 0.8, 0.9
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
_GAINS = {
    "draft.mixed embedding": "layers.0.input_layernorm.weight",
    "draft.mixed state": "layers.0.hidden_norm.weight",
    "draft.final": "norm.weight",
}


def verdict(stage: Stage, errors: Errors, between: list[str], trier: Trier) -> Verdict | None:
    """What the one matrix before a stage is; None where more than a matrix lies there.

    Its input was captured and so was its output: where they do not fit, it is the matrix, fitted or not.
    """
    name = _NAMES.get(stage.name)
    if name is None or between != [stage.site] or not _alone(stage, errors, trier):
        return None
    wide = _all_rows(stage, trier)
    inputs_ni, outputs_no, base_no = _sides(wide, trier)
    ref = trier.material.ref
    weight_oi = (ref.head if name == "lm_head" else ref.weights[f"{name}.weight"]).float().numpy()
    told = _told(wide, errors, inputs_ni, outputs_no, base_no, weight_oi)
    if told is None:
        return None
    title, left, proof, confidence = told
    short = name.rsplit(".", 1)[-1]
    so = "" if left is None else f", {figure(left)} so"
    return Verdict(
        "weights",
        stage.name,
        f"the draft's {short} {title}",
        steps=[f"Look at {short} in the checkpoint and at how it is loaded (name, dtype, scales, sharding)."],
        proof=[
            f"{stage.name}: error {figure(errors.median)} against the checkpoint{so}; expected "
            f"{figure(stage.expected)} or less",
            proof,
        ],
        error=errors.median if left is None else left,
        before=errors.median,
        agree=int(errors.over.sum()),
        rows=len(errors.finite),
        confidence=confidence,
    )


def _told(
    stage: Stage, errors: Errors, inputs_ni: Floats, outputs_no: Floats, base_no: Floats, weight_oi: Floats
) -> tuple[str, float | None, str, float] | None:
    """What became of the matrix, the error that this leaves, the evidence, and how sure it is.

    None where some rows are right, as they would not be with another matrix.
    """
    limit = MEDIAN_ALLOWANCE * stage.expected
    scaled = _scaled(inputs_ni, outputs_no, weight_oi)
    if scaled is not None and (left := _left(scaled[0] + base_no, stage)) <= limit:
        low, high = scaled[1]
        title = f"is scaled, block by block of {_BLOCK}: by {low:.3g} to {high:.3g}"
        return title, left, "a quantised matrix whose scales were lost or applied twice looks like this", 1.0
    fitted = _fitted(inputs_ni, outputs_no)
    other = "holds other values than the checkpoint's: not loaded, or of another training"
    if fitted is not None:
        rows, guess = fitted
        left = float(np.median(row_errors(stage.captured[rows], guess + base_no[rows], stage.scale)))
        if left <= max(limit, 0.02 * errors.median):
            proof = "a matrix fitted to some rows gives the others: the input is right, the values are not"
            return other, left, proof, 1.0
    if errors.over.sum() < _NEARLY_ALL * len(errors.finite):
        return None
    proof = "nothing but this matrix lies between what was captured before it and after it"
    return other, None, proof, _ALONE


def _alone(stage: Stage, errors: Errors, trier: Trier) -> bool:
    """Whether nothing but the matrix lies between the stage and the captured site before it."""
    config = trier.material.ref.config
    if stage.site == "draft.fc":
        return not (config.norm_before_fc or config.fc_norm)
    if stage.site != "draft.gate_up":
        return True
    # The norm before gate and up is right where one of them is.
    computed = trier.computed(Variant(trier.material.ref), stage.site, stage.index)
    parts = stages(stage.site, trier.material, stage.index, 2)
    return any(part.against(computed).good for part in parts if part.name != stage.name)


def gain(stage: Stage, errors: Errors, between: list[str], trier: Trier) -> Verdict | None:
    """Whether the norm before a stage has another gain than the checkpoint's; None where that does not do."""
    name = _GAINS.get(stage.name)
    if name is None or between != [stage.site]:
        return None
    ones = torch.ones_like(trier.material.ref.weights[name])
    variant = Variant(trier.material.ref.with_weights({name: ones}))
    unit_nH = trier.computed(variant, stage.site, stage.index)[:, stage.part].numpy()
    held = np.arange(len(unit_nH)) % _HELD_OUT == 0
    size = (unit_nH[~held] ** 2).sum(axis=0)
    gain_H = (unit_nH[~held] * stage.captured[~held]).sum(axis=0) / np.where(size > 0, size, 1)
    left = float(np.median(row_errors(stage.captured[held], unit_nH[held] * gain_H, stage.scale)))
    if left > MEDIAN_ALLOWANCE * stage.expected:
        return None
    short = name.split(".")[-2] if "layers" in name else "final norm"
    return Verdict(
        "weights",
        stage.name,
        f"the gain of the draft's {short} is not the checkpoint's",
        steps=[f"Look at the weight of {short} in the checkpoint and at how it is loaded."],
        proof=[
            f"{stage.name}: error {figure(errors.median)} against the checkpoint, {figure(left)} with "
            f"another gain; expected {figure(stage.expected)} or less",
            "a gain fitted to some rows gives the others: the norm is applied, its weight is another",
        ],
        error=left,
        before=errors.median,
        agree=int(errors.over.sum()),
        rows=len(errors.finite),
    )


def _all_rows(stage: Stage, trier: Trier) -> Stage:
    """The same stage over every row that was captured: a fit needs many."""
    material = trier.material
    index = np.flatnonzero(computable(material, stage.site, trier.seen) & material.holds(stage.site))
    if len(index) <= len(stage.index):
        return stage
    found = stages(stage.site, material, index[:: max(1, len(index) // _MOST)], 1)
    wide = next(one for one in found if one.name == stage.name)
    return replace(wide, expected=stage.expected, scale=stage.scale)


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
    if width > _WIDEST or (~held).sum() < _LEAST * width:
        return None
    found, *_ = np.linalg.lstsq(
        inputs_ni[~held].astype(np.float64), outputs_no[~held].astype(np.float64), rcond=None
    )
    return np.flatnonzero(held), (inputs_ni[held] @ found).astype(np.float32)
