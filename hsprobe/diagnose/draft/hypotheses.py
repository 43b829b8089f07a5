"""What may be wrong with each part of a draft, as variants of its computation.

Shapes: n rows, H hidden size, o outputs and i inputs of a matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hsprobe.diagnose.draft.compute import Variant
from hsprobe.diagnose.draft.material import Material
from hsprobe.draft.checkpoint import target_head
from hsprobe.draft.timeline import Ints
from hsprobe.errors import HsprobeError

_ATTENTION, _MLP = "layers.0.self_attn.", "layers.0.mlp."
_NORM_OF = {
    "draft.mixed embedding": "layers.0.input_layernorm.weight",
    "draft.mixed state": "layers.0.hidden_norm.weight",
    "draft.gate_up": "layers.0.post_attention_layernorm.weight",
    "draft.final": "norm.weight",
}
_MATRICES = {
    "draft.fc": ("fc",),
    "draft.qkv": tuple(f"{_ATTENTION}{part}_proj" for part in "qkv"),
    "draft.attention": (f"{_ATTENTION}o_proj",),
    "draft.gate_up": (f"{_MLP}gate_proj", f"{_MLP}up_proj"),
    "draft.layer": (f"{_MLP}down_proj",),
}
"""Site -> matrices that lie just before it."""
SHIFTS = (-1, 1, -2, 2)


@dataclass(frozen=True)
class Hypothesis:
    """One way in which a stage may be wrong; the fields are those of a `Verdict`."""

    kind: str
    title: str
    variant: Variant
    change: str | None = None
    steps: list[str] = field(default_factory=list)


def of_site(site: str, material: Material) -> Iterator[Hypothesis]:
    """All that may be wrong between the site before and this one."""
    plain = Variant(material.ref)
    if site == "draft.fc":
        yield from _before_fc(material, plain)
    if site == "draft.embed":
        yield from _embeddings(material, plain)
    yield from _norms(site, material, plain)
    for name in _MATRICES.get(site, ()):
        yield from _matrix(name, material, plain)
    if site == "draft.logits":
        yield from _heads(material, plain)


def _before_fc(material: Material, plain: Variant) -> Iterator[Hypothesis]:
    ref, config = material.ref, material.ref.config
    whole, each = torch.ones(config.aux_width), torch.ones(config.target_hidden)
    ones = {"input_norm.weight": whole, **{f"fc_norm.{k}.weight": each for k in range(config.chunks)}}
    where = f"in {material.served_config}"
    if config.norm_before_fc:
        without = replace(ref, config=replace(config, norm_before_fc=False))
        yield Hypothesis(
            "norm",
            "the norm before fc (input_norm) is not applied, though the checkpoint holds its weight",
            Variant(without),
            "norm_before_fc: false  ->  true",
            [f"Set it {where}: without it SGLang passes the weight over in silence."],
        )
        yield _unit(plain, ref.with_weights(ones), "the norm before fc")
    else:
        extra = replace(ref.with_weights(ones), config=replace(config, norm_before_fc=True))
        yield Hypothesis(
            "norm",
            "a norm over the whole aux vector is applied before fc, which the checkpoint has no weight of",
            Variant(extra),
            "norm_before_fc: true  ->  false",
            [f"Set it {where}."],
        )
    if config.fc_norm:
        without = replace(ref, config=replace(config, fc_norm=False))
        yield Hypothesis(
            "norm",
            "the norms of the chunks before fc (fc_norm) are not applied, though the checkpoint holds them",
            Variant(without),
            "fc_norm: false  ->  true",
            [f"Set it {where}: without it SGLang passes the weights over in silence."],
        )
        yield _unit(plain, ref.with_weights(ones), "the norms of the chunks before fc")
    else:
        extra = replace(ref.with_weights(ones), config=replace(config, fc_norm=True))
        yield Hypothesis(
            "norm",
            "every chunk is normed before fc, which the checkpoint has no weights of",
            Variant(extra),
            "fc_norm: true  ->  false",
            [f"Set it {where}."],
        )


def _unit(plain: Variant, ref: object, what: str) -> Hypothesis:
    variant = replace(plain, ref=ref)  # type: ignore[arg-type]
    return Hypothesis(
        "weights",
        f"{what}: a gain of one is applied, so the weight was not loaded",
        variant,
        steps=[
            "Look at the weight's name in the checkpoint: SGLang passes over names that it does not know."
        ],
    )


def _norms(site: str, material: Material, plain: Variant) -> Iterator[Hypothesis]:
    names = {name for place, name in _NORM_OF.items() if place.split()[0] == site}
    gains = {name: material.ref.weights[name] for name in _NORM_OF.values()}
    for name in sorted(names):
        short = _short(name)
        yield Hypothesis(
            "norm",
            f"the draft's {short} is not applied",
            replace(plain, skipped=frozenset({name})),
            steps=[f"Apply {short} where llama_eagle3.py does: the checkpoint was trained with it."],
        )
        yield _unit(
            plain, material.ref.with_weights({name: torch.ones_like(gains[name])}), f"the draft's {short}"
        )
        for other, gain in gains.items():
            if other != name:
                yield Hypothesis(
                    "norm",
                    f"the draft's {short} has the gain of its {_short(other)}",
                    replace(plain, ref=material.ref.with_weights({name: gain})),
                    steps=["Look at how the checkpoint's norms are mapped to the module's."],
                )
    if site == "draft.mixed":
        yield Hypothesis(
            "weights",
            "q, k and v are given the state before the embedding, instead of after it",
            replace(plain, swapped=True),
            steps=["The first half of their input is the normed embedding, the second the normed state."],
        )


def _embeddings(material: Material, plain: Variant) -> Iterator[Hypothesis]:
    ref, rows = material.ref, material.rows

    def from_table(table_VH: Tensor, shift: int | None) -> Variant:
        def embed(index: Ints) -> Tensor:
            tokens = rows.token[index] if shift is None else shifted_tokens(material, index, shift)
            return table_VH[torch.from_numpy(tokens.clip(0, len(table_VH) - 1))].to(ref.dtype)

        return replace(plain, embed=embed)

    if ref.own_embedding is not None:
        yield Hypothesis(
            "embed",
            "the draft embeds with its own checkpoint's table, not with the target's",
            from_table(ref.own_embedding, None),
            steps=["Find out which of the two the draft was trained with; SGLang shares the target's."],
        )
    yield Hypothesis(
        "embed",
        "the draft's token embedding is zero: the table was not loaded, or not tied to the target's",
        from_table(torch.zeros_like(ref.embedding[:1]), None),
        steps=["Tie it to the target's (set_embed)."],
    )
    for shift in SHIFTS:
        yield Hypothesis(
            "tokens",
            f"the draft embeds the token {abs(shift)} position{'s' if abs(shift) > 1 else ''} "
            f"{'before' if shift < 0 else 'after'} the one it is fed",
            from_table(ref.embedding, shift),
            steps=[TOKEN_STEP],
        )


TOKEN_STEP = (
    "Row p of an EAGLE-3 draft takes the target's state at p and the token at p+1: shift the ids once."
)


def shifted_tokens(material: Material, index: Ints, shift: int) -> Ints:
    """The tokens that stand `shift` places after those that rows are fed; their own where none is known."""
    rows = material.rows
    out = rows.token[index].copy()
    for place, row in enumerate(index.tolist()):
        other = row + shift
        if int(rows.first[row]) <= other < int(rows.last[row]):
            out[place] = rows.token[other]
            continue
        tokens, at = rows.tokens_of[int(rows.request[row])], int(rows.slot[row]) + 1 + shift
        if 0 <= at < len(tokens):
            out[place] = tokens[at]
    return out


def _matrix(name: str, material: Material, plain: Variant) -> Iterator[Hypothesis]:
    """Ways in which a matrix may have been loaded wrongly that its values tell."""
    weight_oi, short = material.ref.weights[f"{name}.weight"], _short(name)
    tries: list[tuple[str, Tensor]] = [
        ("is zero: it was not loaded", torch.zeros_like(weight_oi)),
        ("is transposed", weight_oi.T.contiguous().view(weight_oi.shape)),
    ]
    for other in _siblings(name):
        theirs = material.ref.weights[f"{other}.weight"]
        if theirs.shape == weight_oi.shape:
            tries.append((f"holds the values of {_short(other)}", theirs))
    for what, changed in tries:
        if torch.equal(changed, weight_oi):
            continue
        yield Hypothesis(
            "weights",
            f"the draft's {short} {what}",
            replace(plain, ref=material.ref.with_weights({f"{name}.weight": changed})),
            steps=[
                f"Look at {short} in the checkpoint (name, shape, order of axes) and at how it is loaded."
            ],
        )


def _siblings(name: str) -> list[str]:
    groups = (_MATRICES["draft.qkv"], _MATRICES["draft.gate_up"])
    return [other for group in groups if name in group for other in group if other != name]


def _heads(material: Material, plain: Variant) -> Iterator[Hypothesis]:
    ref = material.ref
    tries = [("is zero: it was not loaded", torch.zeros_like(ref.head))]
    shared = _target_head(material)
    if shared is not None and shared.shape == ref.head.shape:
        tries.append(("is the target's, as with --speculative-algorithm EAGLE", shared))
    if ref.head.shape[0] == ref.head.shape[1]:
        tries.append(("is transposed", ref.head.T))
    if ref.embedding.shape[0] >= len(ref.head):
        tries.append(("is the token embedding", ref.embedding[: len(ref.head)]))
        tries.append(
            (
                "is the token embedding, of the draft's tokens",
                ref.embedding[ref.token_of.clamp(0, len(ref.embedding) - 1)],
            )
        )
    for what, head in tries:
        yield Hypothesis(
            "weights",
            f"the draft's lm_head {what}",
            replace(plain, ref=replace(ref, head=head)),
            steps=[
                "Look at lm_head.weight in the checkpoint, at tie_word_embeddings and at draft_vocab_size."
            ],
        )


def _target_head(material: Material) -> Tensor | None:
    try:
        return None if material.target is None else target_head(material.target)
    except HsprobeError:
        return None


def _short(name: str) -> str:
    """`layers.0.self_attn.q_proj.weight` -> `q_proj`; the draft's last norm is called by its place."""
    short = name.removesuffix(".weight").rsplit(".", 1)[-1]
    return "final norm" if short == "norm" else short
