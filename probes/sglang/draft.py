"""Sites of the draft: what it is given (``draft.input``, or its own ``draft.recycled`` state), what its
``fc`` makes of it, and the state before (``draft.layer``) and after (``draft.final``) its norm.

Source: ``models/llama_eagle3.py:LlamaModel.forward``. On extend passes ``spec_info.hidden_states`` holds
the target's chunks, on decode passes the draft's own last state; ``fc`` runs only for the former.
"""

from typing import Any

import torch

from hsprobe.probes.sglang.recorder import Recorder


class DraftProbe:
    """Watches the modules of a loaded EAGLE-3 draft."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def attach(self, runner: Any) -> None:
        """Hook the draft's inner model, its ``fc`` and its ``norm``."""
        if not runner.is_draft_worker:
            return
        inner = getattr(runner.model, "model", None)
        if inner is None:
            raise LookupError(f"{type(runner.model).__name__} has no inner model")
        wants = self._recorder.settings.wants
        if wants("draft.input"):
            inner.register_forward_pre_hook(self._entered, with_kwargs=True)
        if wants("draft.fc") and hasattr(inner, "fc"):
            inner.fc.register_forward_hook(self._projected)
        if hasattr(inner, "norm"):
            inner.norm.register_forward_hook(self._normed)

    def _take(self, name: str, tensor: torch.Tensor) -> None:
        labelled = self._recorder.current(draft=True)
        if labelled is not None:
            self._recorder.guard(name, lambda: self._recorder.take(labelled, name, tensor, site=name))

    def _entered(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        labelled = self._recorder.current(draft=True)
        if labelled is None:
            return

        def take() -> None:
            batch = args[2] if len(args) > 2 else kwargs["forward_batch"]
            name = "draft.recycled" if labelled.phase == "draft_decode" else "draft.input"
            self._recorder.take(labelled, name, batch.spec_info.hidden_states, site=name)

        self._recorder.guard("draft.input", take)

    def _projected(self, module: torch.nn.Module, args: Any, output_TH: torch.Tensor) -> None:
        self._take("draft.fc", output_TH)

    def _normed(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if not isinstance(output, tuple):
            output = (output, None)
        for name, tensor in zip(("draft.final", "draft.layer"), output, strict=False):
            if tensor is not None and self._recorder.settings.wants(name):
                self._take(name, tensor)
