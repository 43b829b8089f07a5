"""Sites ``aux`` and ``logits_processor``: what the target hands over, and what is kept of it.

``LogitsProcessor.forward`` receives the hidden states after the final norm and the K aux chunks, and
stores (under the pass's capture mode) what the draft will get (``layers/logits_processor.py``).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hsprobe.probes.sglang.labels import Pass
from hsprobe.probes.sglang.provenance import captured_depths, layers_of_model
from hsprobe.probes.sglang.recorder import Recorder
from hsprobe.probes.sglang.tape import Tape

PARAMETERS = ("input_ids", "hidden_states", "lm_head", "logits_metadata", "aux_hidden_states")


def _argument(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    position = PARAMETERS.index(name)
    return args[position] if len(args) > position else kwargs.get(name)


class LogitsProbe:
    """Watches the logits processor of the target, and the logits of the draft."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._target: torch.nn.Module | None = None
        self._depths: list[int] | None = None

    def attach(self, runner: Any) -> None:
        """Hook the loaded model's own logits processor."""
        processor = getattr(runner.model, "logits_processor", None)
        if processor is None:
            named = runner.model.named_modules()
            processor = next((m for _, m in named if type(m).__name__ == "LogitsProcessor"), None)
        if processor is None:
            raise LookupError(f"{type(runner.model).__name__} has no logits processor")
        if runner.is_draft_worker:
            processor.register_forward_pre_hook(self._label, with_kwargs=True)
            processor.register_forward_hook(self._draft_done)
            if self._recorder.settings.wants("draft.logits"):
                self._recorder.proof.expect("draft.logits", draft=True)
            return
        self._target = runner.model
        if self._recorder.settings.wants("logits_processor"):
            self._recorder.proof.expect("logits_processor.input", compared=True)
        processor.register_forward_pre_hook(self._entered, with_kwargs=True)
        processor.register_forward_hook(self._done)

    def _label(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """Inside a graph every model passes here, with the token ids and positions of its rows."""
        positions = getattr(_argument("logits_metadata", args, kwargs), "positions", None)
        if positions is not None:
            ids = _argument("input_ids", args, kwargs)
            self._recorder.guard("graphs", lambda: self._recorder.labels(ids, positions))

    def _entered(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if not self._recorder.in_graph:
            self._take_arguments(args, kwargs)
            return

        def take() -> None:
            with self._recorder.together():
                self._label(module, args, kwargs)
                self._take_arguments(args, kwargs)

        self._recorder.guard("graphs", take)

    def _take_arguments(self, args: Any, kwargs: Any) -> None:
        labelled = self._recorder.current(draft=False)
        if labelled is None:
            return
        if self._recorder.settings.wants("aux"):
            aux = _argument("aux_hidden_states", args, kwargs)
            self._recorder.guard("aux", lambda: self._take_aux(labelled, aux))
        if self._recorder.settings.wants("logits_processor"):
            hidden_TH = _argument("hidden_states", args, kwargs)
            name = "logits_processor.input"
            self._recorder.guard(
                "logits_processor",
                lambda: self._recorder.take(labelled, name, hidden_TH, site=name, depth="final"),
            )

    def _take_aux(self, labelled: Pass | Tape, aux: torch.Tensor | Sequence[torch.Tensor] | None) -> None:
        if aux is None or len(aux) == 0:
            return
        if self._depths is None and self._target is not None:
            # Only the layers of this pipeline stage can have been captured here, whatever was asked for.
            first = layers_of_model(self._target).get("first_layer", 0)
            self._depths = [d for d in captured_depths(self._target) or () if d >= first] or None
        chunks = len(self._depths) if self._depths else (1 if isinstance(aux, torch.Tensor) else len(aux))
        self._recorder.take(labelled, "aux", aux, site="aux", depths=self._depths, chunks=chunks)

    def _done(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        labelled = self._recorder.current(draft=False)
        stored = getattr(output, "hidden_states", None)
        if labelled is None or stored is None or not self._recorder.settings.wants("logits_processor"):
            return
        name = "logits_processor.stored"
        self._recorder.guard(
            "logits_processor", lambda: self._recorder.take(labelled, name, stored, site=name, last=True)
        )

    def _draft_done(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        labelled = self._recorder.current(draft=True)
        logits = getattr(output, "next_token_logits", None)
        if labelled is None or logits is None or not self._recorder.settings.wants("draft.logits"):
            return
        name = "draft.logits"
        self._recorder.guard(name, lambda: self._recorder.take(labelled, name, logits, site=name, last=True))
