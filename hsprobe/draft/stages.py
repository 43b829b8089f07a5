"""An EAGLE-3 draft (`LlamaForCausalLMEagle3`), computed stage by stage.

Row p of the draft takes the target's aux vector at position p, the embedding of token p+1 and RoPE position
p, and predicts token p+2. A later step of the same chain takes the draft's own state of the row before in
place of an aux vector, which then passes `fc` by. Source: ``sglang/srt/models/llama_eagle3.py`` (0.5.23);
written anew.

Shapes: T rows, H draft hidden size, A = chunks * target hidden size, N heads, M key heads, D channels a
head, S keys, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from hsprobe.draft.config import DraftConfig
from hsprobe.draft.rope import Rotation
from hsprobe.errors import HsprobeError

_LOGIT_ROWS = 256
"""Rows whose logits are computed at once where only the best token is asked for."""


@dataclass
class KVCache:
    """Keys (rotated) and values of the rows so far, a pair for each layer. [S, M, D]"""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.keys[0]) if self.keys else 0

    def crop(self, length: int) -> KVCache:
        """The first rows only, sharing memory with this one."""
        return KVCache([k[:length] for k in self.keys], [v[:length] for v in self.values])

    def extend(self, layer: int, k_TMD: Tensor, v_TMD: Tensor) -> tuple[Tensor, Tensor]:
        """Add rows to a layer and return all of its keys and values."""
        if layer == len(self.keys):
            self.keys.append(k_TMD)
            self.values.append(v_TMD)
        else:
            self.keys[layer] = torch.cat((self.keys[layer], k_TMD))
            self.values[layer] = torch.cat((self.values[layer], v_TMD))
        return self.keys[layer], self.values[layer]


@dataclass(frozen=True)
class StageOutputs:
    """What each stage gives for the rows of one forward.

    Attributes:
        fused_TH: the state that enters the layer: `fc` of an aux vector, or a recycled state as it came.
        embed_TH: embedding of the fed tokens.
        mixed_TM: input of q, k and v: normed embedding beside normed state, [T, 2H].
        attended_TH: output of the attention, of the last layer.
        layer_TH: the stream after the last layer, before the norm.
        final_TH: after the norm; what lm_head takes.
        recycled_TH: what the next step of a chain gets: `layer_TH`, or `final_TH` with `norm_output`.
        cache: keys and values of these rows and all before.
    """

    fused_TH: Tensor
    embed_TH: Tensor
    mixed_TM: Tensor
    attended_TH: Tensor
    layer_TH: Tensor
    final_TH: Tensor
    recycled_TH: Tensor
    cache: KVCache


@dataclass(frozen=True)
class DraftReference:
    """The draft of a checkpoint. Every stage is a method of its own; `forward` joins them.

    Attributes:
        weights: by canonical name: `fc.weight`, `layers.0.self_attn.q_proj.weight`, `norm.weight`...
        embedding: token embedding, as stored. [target vocabulary, H]
        head: lm_head, as stored. [V, H]
        own_embedding: the embedding in the draft's checkpoint, where there is one that SGLang passes over.
        token_of: target id of each draft id, int64 [V]; the checkpoint's `d2t` holds the difference.
        dtype: in which everything is computed.
        window: keys before its own that a row sees; None for all.
    """

    config: DraftConfig
    weights: Mapping[str, Tensor]
    embedding: Tensor
    head: Tensor
    token_of: Tensor
    dtype: torch.dtype = torch.float32
    window: int | None = None
    own_embedding: Tensor | None = None

    @cached_property
    def rotation(self) -> Rotation:
        return Rotation(self.config.rope)

    def weight(self, name: str) -> Tensor:
        """A weight in the dtype of the computation."""
        return self.weights[name].to(self.dtype)

    def rms_norm(self, x: Tensor, name: str) -> Tensor:
        """RMSNorm with the gain `name`, in float32 within."""
        wide = x.float()
        unit = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.config.eps)
        return (unit * self.weights[name].float()).to(self.dtype)

    def linear(self, x: Tensor, name: str) -> Tensor:
        """`x` through the matrix `name` and its bias, if it has one."""
        bias = self.weights.get(f"{name}.bias")
        return functional.linear(
            x, self.weight(f"{name}.weight"), None if bias is None else bias.to(self.dtype)
        )

    def embed(self, tokens_T: Tensor) -> Tensor:
        """[T] int64 -> [T, H]"""
        return self.embedding[tokens_T].to(self.dtype)

    def pre_fc(self, hidden_TA: Tensor) -> Tensor:
        """The norms before `fc`, as far as the configuration has any. [T, A] -> [T, A]"""
        config = self.config
        if config.norm_before_fc:
            hidden_TA = self.rms_norm(hidden_TA, "input_norm.weight")
        if config.fc_norm:
            chunks = hidden_TA.chunk(config.chunks, dim=-1)
            normed = [self.rms_norm(chunk, f"fc_norm.{k}.weight") for k, chunk in enumerate(chunks)]
            hidden_TA = torch.cat(normed, dim=-1)
        return hidden_TA

    def fuse(self, hidden: Tensor) -> Tensor:
        """What enters the layer: an aux vector [T, A] through `fc`; a state [T, H] as it is."""
        hidden = hidden.to(self.dtype)
        if hidden.shape[-1] == self.config.hidden:
            return hidden
        return self.linear(self.pre_fc(hidden), "fc")

    def mix(self, embed_TH: Tensor, fused_TH: Tensor) -> Tensor:
        """Input of the first layer's q, k and v. -> [T, 2H]"""
        embed = self.rms_norm(embed_TH, "layers.0.input_layernorm.weight")
        return torch.cat((embed, self.rms_norm(fused_TH, "layers.0.hidden_norm.weight")), dim=-1)

    def project(self, mixed: Tensor, positions_T: Tensor, layer: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [T, N, D], rotated keys and values [T, M, D]."""
        config = self.config
        part = f"layers.{layer}.self_attn."
        q = self.linear(mixed, f"{part}q_proj").unflatten(-1, (config.heads, config.head_dim))
        k = self.linear(mixed, f"{part}k_proj").unflatten(-1, (config.kv_heads, config.head_dim))
        v = self.linear(mixed, f"{part}v_proj").unflatten(-1, (config.kv_heads, config.head_dim))
        return self.rotation(q, positions_T), self.rotation(k, positions_T), v

    def attend(self, q_TND: Tensor, k_SMD: Tensor, v_SMD: Tensor, seen_TS: Tensor, layer: int = 0) -> Tensor:
        """Attention over the keys that each row sees (bool [T, S]) and `o_proj`. -> [T, H]"""
        group = self.config.heads // self.config.kv_heads
        k_NSD = k_SMD.transpose(0, 1).repeat_interleave(group, dim=0)
        v_NSD = v_SMD.transpose(0, 1).repeat_interleave(group, dim=0)
        mixed = functional.scaled_dot_product_attention(
            q_TND.transpose(0, 1), k_NSD, v_NSD, attn_mask=seen_TS
        )
        return self.linear(mixed.transpose(0, 1).flatten(1), f"layers.{layer}.self_attn.o_proj")

    def feed(self, stream_TH: Tensor, layer: int = 0) -> Tensor:
        """What the MLP adds to the stream after the attention. -> [T, H]"""
        part = f"layers.{layer}.mlp."
        x = self.rms_norm(stream_TH, f"layers.{layer}.post_attention_layernorm.weight")
        gate, up = self.linear(x, f"{part}gate_proj"), self.linear(x, f"{part}up_proj")
        return self.linear(functional.silu(gate) * up, f"{part}down_proj")

    def final(self, layer_TH: Tensor) -> Tensor:
        """The draft's norm. -> [T, H]"""
        return self.rms_norm(layer_TH, "norm.weight")

    def logits(self, final_TH: Tensor) -> Tensor:
        """[T, H] -> [T, V], by draft ids."""
        return functional.linear(final_TH.to(self.dtype), self.head.to(self.dtype))

    def best_tokens(self, final_TH: Tensor) -> Tensor:
        """The likeliest next token of each row, as target ids. [T, H] -> [T] int64"""
        best = [self.logits(block).argmax(-1) for block in final_TH.split(_LOGIT_ROWS)]
        return self.token_of[torch.cat(best)] if best else self.token_of[:0]

    def forward(
        self,
        hidden: Tensor,
        tokens_T: Tensor,
        positions_T: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> StageOutputs:
        """Rows of one request, one after the other, after those in `cache` (which is left as it is).

        Args:
            hidden: aux vectors [T, A], or states of the draft itself [T, H].
            tokens_T: int64, the token that each row is fed: that of position p+1.
            positions_T: int64, by default those that follow the cache.
        """
        cache = KVCache() if cache is None else KVCache(list(cache.keys), list(cache.values))
        before, rows = len(cache), len(tokens_T)
        at_T = torch.arange(before, before + rows, device=tokens_T.device)
        positions_T = at_T if positions_T is None else positions_T
        seen_TS = self.sees(at_T, torch.arange(before + rows, device=tokens_T.device))
        embed_TH, fused_TH = self.embed(tokens_T), self.fuse(hidden)
        mixed = first = self.mix(embed_TH, fused_TH)
        stream_TH, attended_TH = fused_TH, fused_TH
        for layer in range(self.config.layers):
            if layer:
                mixed = self.rms_norm(stream_TH, f"layers.{layer}.hidden_norm.weight")
            q_TND, k_TMD, v_TMD = self.project(mixed, positions_T, layer)
            attended_TH = self.attend(q_TND, *cache.extend(layer, k_TMD, v_TMD), seen_TS, layer)
            stream_TH = stream_TH + attended_TH
            stream_TH = stream_TH + self.feed(stream_TH, layer)
        final_TH = self.final(stream_TH)
        recycled_TH = final_TH if self.config.norm_output else stream_TH
        return StageOutputs(fused_TH, embed_TH, first, attended_TH, stream_TH, final_TH, recycled_TH, cache)

    def sees(self, rows_T: Tensor, keys_S: Tensor) -> Tensor:
        """Which keys each row sees, by their places in the sequence. -> bool [T, S]"""
        distance = rows_T[:, None] - keys_S[None, :]
        seen = distance >= 0
        return seen if self.window is None else seen & (distance <= self.window)

    def draft_chain(self, after: StageOutputs, steps: int) -> list[int]:
        """The tokens that the draft proposes after the last row of a forward, greedily, as target ids."""
        tokens: list[int] = []
        for step in range(steps):
            best_1 = self.best_tokens(after.final_TH[-1:])
            tokens.append(int(best_1))
            if step < steps - 1:
                after = self.forward(after.recycled_TH[-1:], best_1, None, after.cache)
        return tokens

    def unroll(self, hidden_TA: Tensor, tokens_T: Tensor, steps: int) -> list[Tensor]:
        """States after the norm of every step, at all rows at once. -> steps x [T, H]

        Every step is fed the tokens given. A chain's later tokens count only where the earlier ones agreed
        with the target's, so feeding the target's gives the acceptances that feeding the draft's own would.
        Step j (from 0) at row q continues the chain that began at row q - j; rows q < j of it mean nothing.

        Raises:
            HsprobeError: the draft has several layers.
        """
        if self.config.layers != 1:
            raise HsprobeError(
                "A draft of several layers cannot be unrolled for all rows at once.", "Use draft_chain."
            )
        rows = len(tokens_T)
        at_T = torch.arange(rows, device=tokens_T.device)
        embed_TH, state_TH = self.embed(tokens_T), self.fuse(hidden_TA)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        finals: list[Tensor] = []
        for step in range(steps):
            q_TND, k_TMD, v_TMD = self.project(self.mix(embed_TH, state_TH), at_T)
            keys.append(k_TMD)
            values.append(v_TMD)
            seen = self._chain_sees(at_T, step)
            stream_TH = state_TH + self.attend(q_TND, torch.cat(keys), torch.cat(values), seen)
            stream_TH = stream_TH + self.feed(stream_TH)
            finals.append(self.final(stream_TH))
            recycled_TH = finals[-1] if self.config.norm_output else stream_TH
            state_TH = functional.pad(recycled_TH[:-1], (0, 0, 1, 0))
        return finals

    def _chain_sees(self, at_T: Tensor, step: int) -> Tensor:
        """Keys of steps 0..step, side by side: those of the chain's past only. -> bool [T, (step+1)*T]"""
        distance_TT = at_T[:, None] - at_T[None, :]
        near = distance_TT >= step
        if self.window is not None:
            near &= distance_TT <= self.window
        # A row without a chain of this length sees itself, so that no softmax is empty.
        parts = [near | ((at_T < step)[:, None] & (distance_TT == 0))]
        parts += [distance_TT == step - earlier for earlier in range(1, step + 1)]
        return torch.cat(parts, dim=1)

    def with_weights(self, changed: Mapping[str, Tensor]) -> DraftReference:
        """The same draft with some weights changed."""
        return replace(self, weights={**self.weights, **changed})
