"""Sites of the draft: what it is given (``draft.input``, or its own ``draft.recycled`` state), and what each
of its parts makes of that, in the order in which they run:

``draft.fc``; ``draft.embed``, the embedding of the fed tokens; ``draft.mixed``, both normed side by side;
``draft.qkv``, before RoPE; ``draft.context``, what the attention hands to its o_proj, and ``draft.attention``
what comes of it; ``draft.gate_up``, before the activation; the stream before (``draft.layer``) and after
(``draft.final``) the draft's norm. Under tensor parallelism qkv, context and gate_up are this rank's share.

Source: ``models/llama_eagle3.py`` (0.5.9 and 0.5.23). On extend passes ``spec_info.hidden_states`` holds the
target's chunks, on decode passes the draft's own last state; ``fc`` runs only for the former. A draft that is
cut otherwise has some of the parts only, and is recorded as far as it does.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch

from hsprobe.probes.sglang.recorder import Recorder

FIRST = "layers.0"
ONLY = "midlayer"
"""What the draft's layer is called where there can be one only (0.5.9)."""
OUTPUTS = {
    "draft.fc": "fc",
    "draft.embed": "embed_tokens",
    "draft.qkv": f"{FIRST}.self_attn.qkv_proj",
    "draft.attention": f"{FIRST}.self_attn",
    "draft.gate_up": f"{FIRST}.mlp.gate_up_proj",
}
"""Site -> the part of the draft's inner model whose output it is."""
SHARES = ("draft.qkv", "draft.context", "draft.gate_up")
"""Sites at which each rank of tensor parallelism has columns of its own."""
INPUTS = {"draft.mixed": f"{FIRST}.self_attn.qkv_proj", "draft.context": f"{FIRST}.self_attn.o_proj"}


class DraftProbe:
    """Watches the modules of a loaded EAGLE-3 draft."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def attach(self, runner: Any) -> None:
        """Hook the draft's inner model and its parts."""
        if not runner.is_draft_worker:
            return
        inner = getattr(runner.model, "model", None)
        if inner is None:
            raise LookupError(f"{type(runner.model).__name__} has no inner model")
        wants = self._recorder.settings.wants
        if wants("draft.input"):
            inner.register_forward_pre_hook(self._entered, with_kwargs=True)
        parts = {
            f"{FIRST}{path.removeprefix(ONLY)}" if path.split(".")[0] == ONLY else path: module
            for path, module in inner.named_modules()
        }
        for site, path in OUTPUTS.items():
            if wants(site) and path in parts:
                parts[path].register_forward_hook(self._output_of(site))
        for site, path in INPUTS.items():
            if wants(site) and path in parts:
                parts[path].register_forward_pre_hook(self._input_of(site))
        if hasattr(inner, "norm"):
            inner.norm.register_forward_hook(self._normed)
        self._expect(inner, parts)

    def _expect(self, inner: torch.nn.Module, parts: Collection[str]) -> None:
        """Say what is to come by, and which parts this draft lacks."""
        places = {"draft.input": "", **OUTPUTS, **INPUTS, "draft.layer": "norm", "draft.final": "norm"}
        for site, path in places.items():
            if self._recorder.settings.wants(site):
                self._recorder.proof.expect(site, draft=True)
                if path not in parts:
                    self._recorder.proof.doubt(site, f"{type(inner).__name__} has no {path}")

    def _take(self, name: str, tensor: torch.Tensor) -> None:
        labelled = self._recorder.current(draft=True)
        if labelled is not None:
            share = name in SHARES
            self._recorder.guard(
                name, lambda: self._recorder.take(labelled, name, tensor, site=name, share=share)
            )

    def _entered(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        labelled = self._recorder.current(draft=True)
        if labelled is None:
            return

        def take() -> None:
            batch = args[2] if len(args) > 2 else kwargs["forward_batch"]
            name = "draft.recycled" if labelled.phase == "draft_decode" else "draft.input"
            self._recorder.take(labelled, name, batch.spec_info.hidden_states, site=name)

        self._recorder.guard("draft.input", take)

    def _output_of(self, site: str) -> Callable[..., None]:
        def take(module: torch.nn.Module, args: Any, output: Any) -> None:
            self._take(site, output[0] if isinstance(output, tuple) else output)

        return take

    def _input_of(self, site: str) -> Callable[..., None]:
        def take(module: torch.nn.Module, args: Any) -> None:
            if args:
                self._take(site, args[0])

        return take

    def _normed(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if not isinstance(output, tuple):
            output = (output, None)
        for name, tensor in zip(("draft.final", "draft.layer"), output, strict=False):
            if tensor is not None and self._recorder.settings.wants(name):
                self._take(name, tensor)
