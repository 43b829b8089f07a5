"""Any site of a draft, computed from what was captured nearest before it: rightly, or under a hypothesis.

Shapes: n rows asked for, S keys, H hidden size, N heads, M key heads, D channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from hsprobe.diagnose.draft.material import Mask, Material
from hsprobe.draft.rope import Rotation
from hsprobe.draft.stages import DraftReference
from hsprobe.draft.timeline import NONE, Ints

SITES = (
    "draft.fc",
    "draft.embed",
    "draft.mixed",
    "draft.qkv",
    "draft.context",
    "draft.attention",
    "draft.gate_up",
    "draft.layer",
    "draft.final",
    "draft.logits",
)
"""In the order in which the draft computes them."""

BEFORE = {
    "draft.mixed": ("draft.fc", "draft.embed"),
    "draft.qkv": ("draft.mixed",),
    "draft.context": ("draft.qkv",),
    "draft.attention": ("draft.context",),
    "draft.gate_up": ("draft.attention", "draft.fc"),
    "draft.layer": ("draft.gate_up", "draft.attention", "draft.fc"),
    "draft.final": ("draft.layer",),
    "draft.logits": ("draft.final",),
}
"""What each site is made of."""


@dataclass(frozen=True)
class Attending:
    """How the attention differs from what it should be.

    Attributes:
        rotation: another RoPE. positions: [T] the positions that it rotates by, for all rows.
        window: keys before its own that a row sees. causal: whether it sees no later row of its own pass.
        prefix: whether it sees the rows of earlier passes.
        stale: for cached slots, "zero" or "last zero"; or a mapping row -> the row whose key lies in its last
            cached slot instead.
    """

    rotation: Rotation | None = None
    positions: Ints | None = None
    window: int | None = None
    causal: bool = True
    prefix: bool = True
    stale: str | Mapping[int, int] | None = None


@dataclass(frozen=True)
class Variant:
    """A hypothesis about what the server's draft computes. The plain one is the checkpoint's own.

    Attributes:
        ref: the draft, perhaps with other weights or settings.
        embed: the embedding of rows, instead of that of their tokens.
        skipped: norms that are not applied, by name of their weight.
        swapped: whether the two halves of the input of q, k and v are exchanged.
    """

    ref: DraftReference
    embed: Callable[[Ints], Tensor] | None = None
    skipped: frozenset[str] = frozenset()
    swapped: bool = False
    attending: Attending = field(default_factory=Attending)

    def norm(self, x: Tensor, name: str) -> Tensor:
        """RMSNorm with the gain `name`, unless it is skipped."""
        return x.to(self.ref.dtype) if name in self.skipped else self.ref.rms_norm(x, name)


class Computer:
    """Computes sites of a variant. What was captured is taken as it is, but for the sites asked for."""

    def __init__(self, material: Material, variant: Variant, seen: Mapping[int, Ints]) -> None:
        self.material = material
        self.variant = variant
        self.seen = seen

    def get(self, site: str, index: Ints) -> Tensor:
        """A site's rows as captured; computed where they were not. -> [n, W]"""
        if self.material.holds(site)[index].all():
            return self.material.read(site, index)
        return self.compute(site, index)

    def compute(self, site: str, index: Ints) -> Tensor:
        """A site's rows, computed from the sites before it. -> [n, W] float32"""
        made: Tensor = getattr(self, "_" + site.removeprefix("draft."))(index)
        return made.float()

    def fused(self, index: Ints) -> Tensor:
        """What enters the layer: `fc` of what the target handed over, or the draft's own state. -> [n, H]"""
        out = torch.empty(len(index), self.variant.ref.config.hidden)
        recycled = self.material.rows.step[index] > 0
        if recycled.any():
            out[torch.from_numpy(recycled)] = self.material.read("draft.recycled", index[recycled])
        if not recycled.all():
            out[torch.from_numpy(~recycled)] = self.get("draft.fc", index[~recycled])
        return out

    def _fc(self, index: Ints) -> Tensor:
        variant, config = self.variant, self.variant.ref.config
        x = self.material.read("draft.input", index)
        if x.shape[-1] == config.hidden:
            return x
        if config.norm_before_fc:
            x = variant.norm(x, "input_norm.weight")
        if config.fc_norm:
            chunks = x.chunk(config.chunks, dim=-1)
            x = torch.cat([variant.norm(c, f"fc_norm.{k}.weight") for k, c in enumerate(chunks)], dim=-1)
        return variant.ref.linear(x, "fc")

    def _embed(self, index: Ints) -> Tensor:
        if self.variant.embed is not None:
            return self.variant.embed(index)
        tokens = torch.from_numpy(
            self.material.rows.token[index].clip(0, len(self.variant.ref.embedding) - 1)
        )
        return self.variant.ref.embed(tokens)

    def _mixed(self, index: Ints) -> Tensor:
        embed = self.variant.norm(self.get("draft.embed", index), "layers.0.input_layernorm.weight")
        state = self.variant.norm(self.fused(index), "layers.0.hidden_norm.weight")
        return torch.cat((state, embed) if self.variant.swapped else (embed, state), dim=-1)

    def _qkv(self, index: Ints) -> Tensor:
        mixed = self.get("draft.mixed", index)
        parts = [self.variant.ref.linear(mixed, f"layers.0.self_attn.{part}_proj") for part in "qkv"]
        return torch.cat(parts, dim=-1)

    def _context(self, index: Ints) -> Tensor:
        return _attended(self, index)

    def _attention(self, index: Ints) -> Tensor:
        return self.variant.ref.linear(self.get("draft.context", index), "layers.0.self_attn.o_proj")

    def _gate_up(self, index: Ints) -> Tensor:
        stream = self.fused(index) + self.get("draft.attention", index)
        x = self.variant.norm(stream, "layers.0.post_attention_layernorm.weight")
        parts = [self.variant.ref.linear(x, f"layers.0.mlp.{part}_proj") for part in ("gate", "up")]
        return torch.cat(parts, dim=-1)

    def _layer(self, index: Ints) -> Tensor:
        gate, up = self.get("draft.gate_up", index).chunk(2, dim=-1)
        added = self.variant.ref.linear(functional.silu(gate) * up, "layers.0.mlp.down_proj")
        return self.fused(index) + self.get("draft.attention", index) + added

    def _final(self, index: Ints) -> Tensor:
        return self.variant.norm(self.get("draft.layer", index), "norm.weight")

    def _logits(self, index: Ints) -> Tensor:
        return self.variant.ref.logits(self.get("draft.final", index))


def _attended(computer: Computer, index: Ints) -> Tensor:
    """The attention of rows over the keys that each sees, before o_proj. -> [n, N*D]"""
    ref, rows = computer.variant.ref, computer.material.rows
    needed = [index, *(computer.seen[int(i)] for i in index), *_substitutes(computer)]
    if not computer.variant.attending.causal:
        needed += [np.arange(int(i), int(rows.last[i])) for i in index]
    keys = np.unique(np.concatenate(needed))
    keys = keys[keys >= 0]
    how, config = computer.variant.attending, ref.config
    qkv = computer.get("draft.qkv", keys)
    q, k, v = qkv.split([config.heads * config.head_dim] + [config.kv_heads * config.head_dim] * 2, dim=-1)
    positions = torch.from_numpy(
        (computer.material.positions if how.positions is None else how.positions)[keys]
    )
    rotation = ref.rotation if how.rotation is None else how.rotation
    turned_q = rotation(q.unflatten(-1, (config.heads, config.head_dim)), positions)
    turned_k = rotation(k.unflatten(-1, (config.kv_heads, config.head_dim)), positions)
    parts = (turned_q, turned_k, v.unflatten(-1, (config.kv_heads, config.head_dim)))
    found = [_one_row(computer, int(row), keys, parts) for row in index]
    return torch.stack(found)


def _substitutes(computer: Computer) -> list[Ints]:
    stale = computer.variant.attending.stale
    return [np.array(list(stale.values()), np.int64)] if isinstance(stale, Mapping) else []


def _one_row(computer: Computer, row: int, keys: Ints, parts: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """[N*D]: what one row makes of the keys that it sees."""
    how, rows = computer.variant.attending, computer.material.rows
    seen = computer.seen[row]
    if not how.causal:
        later = np.arange(row + 1, int(rows.last[row]))
        seen = np.concatenate((seen, later))
    slots = np.arange(len(seen))
    cached = int(rows.cached[row])
    if isinstance(how.stale, Mapping) and cached and row in how.stale:
        seen = seen.copy()
        seen[cached - 1] = how.stale[row]
    keep = np.ones(len(seen), np.bool_)
    if how.window is not None:
        keep &= slots >= int(rows.slot[row]) - how.window
    if not how.prefix:
        keep &= slots >= int(rows.slot[int(rows.first[row])])
    at = np.searchsorted(keys, seen[keep])
    q, k, v = parts[0][np.searchsorted(keys, row)], parts[1][at], parts[2][at]
    if how.stale in ("zero", "last zero"):
        empty = slots[keep] < cached
        if how.stale == "last zero":
            empty &= slots[keep] == cached - 1
        k, v = k.clone(), v.clone()
        k[torch.from_numpy(empty)] = 0
        v[torch.from_numpy(empty)] = 0
    return _attend(q, k, v)


def _attend(q_ND: Tensor, k_SMD: Tensor, v_SMD: Tensor) -> Tensor:
    group = q_ND.shape[0] // k_SMD.shape[1]
    k_NSD = k_SMD.transpose(0, 1).repeat_interleave(group, dim=0)
    v_NSD = v_SMD.transpose(0, 1).repeat_interleave(group, dim=0)
    out_N1D = functional.scaled_dot_product_attention(q_ND[:, None], k_NSD, v_NSD)
    return out_N1D[:, 0].flatten()


def computable(material: Material, site: str, seen: Mapping[int, Ints]) -> Mask:
    """[T] rows for which a site can be computed from what was captured before it.

    Args:
        seen: the keys of the rows whose attention may be asked for; the same in every call.
    """
    if site not in material.ready:
        material.ready[site] = _computable(material, site, seen)
    return material.ready[site]


def _computable(material: Material, site: str, seen: Mapping[int, Ints]) -> Mask:
    rows = material.rows
    fed: Mask = material.holds("draft.input") & (rows.step == 0)
    if site == "draft.fc":
        return fed
    entered = material.holds("draft.recycled") | fed | ((rows.step == 0) & material.holds("draft.fc"))
    ready: Mask = np.ones(len(rows), np.bool_)
    for part in BEFORE.get(site, ()):
        known = material.holds(part)
        if part == "draft.fc":
            ready &= entered
        elif known.all():
            ready &= known
        else:
            ready &= known | computable(material, part, seen)
    if site == "draft.context":
        known = material.holds("draft.qkv") | computable(material, "draft.qkv", seen)
        whole = np.zeros(len(rows), np.bool_)
        for index, keys in seen.items():
            whole[index] = bool((keys != NONE).all() and known[keys].all())
        ready &= whole
    return ready
