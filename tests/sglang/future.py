"""A plugin for SGLang's processes that makes them a version of the future, which serves as this one does.

Decoder layers return something new, do not enter their attention through `prepare`, and after their MLP's
`prepare` the residual stream holds the state before the sum.
"""

import sys

VERSION = "0.9.0"


class Carried:
    """What a decoder layer returns."""

    def __init__(self, value) -> None:
        self.value = value


def install() -> None:
    import sglang

    sglang.__version__ = VERSION
    if "sglang.srt.managers.scheduler" in sys.modules:
        _install()


def _install() -> None:
    from sglang.srt.layers.layer_boundary.residual import batch as residual
    from sglang.srt.layers.layer_boundary.stage import StageBoundary
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    enter, final_norm = StageBoundary.prepare, residual.final_norm
    true_residual = []

    def prepare(boundary, hidden, batch, **call):
        before = batch.residual_stream.residual
        before = None if before is None else before.clone()
        prepared = enter(boundary, hidden, batch, **call)
        true_residual.append(batch.residual_stream.residual)
        batch.residual_stream.residual = before
        return prepared

    def layer(self, positions, hidden_states, forward_batch, capture_output=None):
        hidden = hidden_states.value if isinstance(hidden_states, Carried) else hidden_states
        hidden = enter(self.attn_boundary, hidden, forward_batch, capture=capture_output)
        hidden = self.self_attn(positions=positions, hidden_states=hidden, forward_batch=forward_batch)
        hidden = self.attn_boundary.finish(hidden, forward_batch)
        hidden = self.ffn_boundary.prepare(hidden, forward_batch)
        forward_batch.residual_stream.residual = true_residual.pop()
        hidden = self.mlp(hidden, forward_batch=forward_batch)
        return Carried(self.ffn_boundary.finish(hidden, forward_batch))

    def final(hidden, *args, **kwargs):
        return final_norm(hidden.value if isinstance(hidden, Carried) else hidden, *args, **kwargs)

    stages = "sglang.srt.layers.layer_boundary"
    HookRegistry.register(f"{stages}.stage.StageBoundary.prepare", prepare, HookType.REPLACE)
    HookRegistry.register("sglang.srt.models.llama.LlamaDecoderLayer.forward", layer, HookType.REPLACE)
    HookRegistry.register(f"{stages}.residual.batch.final_norm", final, HookType.REPLACE)
