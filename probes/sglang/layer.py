"""Site ``layer``: the residual stream at every depth; ``mid``: between a layer's attention and its MLP;
``embed``: what the embedding put out.

SGLang 0.5.23 keeps the residual of a forward in ``forward_batch.residual_stream`` and completes a
layer's owed sum when the next layer's attention stage is prepared. Right after that prepare, the
stream holds the input of the layer, which is the output of the one before, reduced over ranks
(``layers/layer_boundary/stage.py:StageBoundary.prepare``). In the same way the MLP's stage leaves the
stream with the layer's attention output added. The last depth comes from the final norm's own residual
output (``layers/layer_boundary/residual/batch.py:final_norm``). Nothing is added to the served path.
"""

import re
from typing import Any

import torch

from hsprobe.probes.sglang.recorder import Recorder

PREPARE = "sglang.srt.layers.layer_boundary.stage.StageBoundary.prepare"
FINAL_NORM = "sglang.srt.layers.layer_boundary.residual.batch.final_norm"


class LayerProbe:
    """Takes depth d when layer d's attention stage has been prepared, and depth L at the final norm."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._place_of: dict[int, tuple[str, int]] = {}
        self._num_layers = 0
        self._boundaries: list[Any] = []

    def hooks(self) -> list[tuple[str, str, Any]]:
        """(target, hook type, function) for SGLang's HookRegistry."""
        if not self._recorder.settings.sites & {"layer", "mid"}:
            return []
        return [(PREPARE, "AFTER", self._prepared), (FINAL_NORM, "AROUND", self._final_norm)]

    def attach(self, runner: Any) -> None:
        """Learn which boundary belongs to which layer of a loaded target, and watch its embedding."""
        if runner.is_draft_worker:
            return
        for name, module in runner.model.named_modules():
            number = re.search(r"layers\.(\d+)$", name)
            for attribute, site in (("attn_boundary", "layer"), ("ffn_boundary", "mid")):
                boundary = vars(module).get(attribute)
                if boundary is not None and number is not None:
                    self._boundaries.append(boundary)
                    self._place_of[id(boundary)] = (site, int(number[1]))
            if name.endswith("embed_tokens") and self._recorder.settings.wants("embed"):
                module.register_forward_hook(self._embedded)
        self._num_layers = int(runner.model_config.num_hidden_layers)

    def _prepared(self, result: Any, boundary: Any, hidden: Any, batch: Any, *_: Any, **__: Any) -> None:
        place = self._place_of.get(id(boundary))
        if place is not None:
            self._recorder.guard(place[0], lambda: self._take(*place, batch.residual_stream.residual))

    def _final_norm(
        self, original: Any, hidden: Any, batch: Any, norm: Any, capture: Any = None, **kwargs: Any
    ) -> Any:
        if self._recorder.current(draft=False) is None:
            return original(hidden, batch, norm, capture, **kwargs)

        def both(residual: torch.Tensor, **ownership: Any) -> None:
            self._recorder.guard("layer", lambda: self._take("layer", self._num_layers, residual))
            if capture is not None:
                capture(residual, **ownership)

        return original(hidden, batch, norm, both, **kwargs)

    def _take(self, site: str, depth: int, residual_TH: torch.Tensor) -> None:
        labelled = self._recorder.current(draft=False)
        if labelled is not None and self._recorder.settings.wants(site, depth):
            self._recorder.take(labelled, f"{site}/{depth:03d}", residual_TH, site=site, depth=depth)

    def _embedded(self, module: torch.nn.Module, args: Any, output_TH: torch.Tensor) -> None:
        def take() -> None:
            labelled = self._recorder.current(draft=False)
            if labelled is not None:
                self._recorder.take(labelled, "embed", output_TH, site="embed", depth=0)

        self._recorder.guard("embed", take)
