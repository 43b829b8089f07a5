"""Site ``layer``: the residual stream at every depth; ``mid``: between a layer's attention and its MLP;
``embed``: what the embedding put out.

SGLang 0.5.23 keeps the residual of a forward in ``forward_batch.residual_stream`` and completes a
layer's owed sum when the next layer's attention stage is prepared. Right after that prepare, the
stream holds the input of the layer, which is the output of the one before, reduced over ranks
(``layers/layer_boundary/stage.py:StageBoundary.prepare``). In the same way the MLP's stage leaves the
stream with the layer's attention output added. The last depth comes from the final norm's own residual
output (``layers/layer_boundary/residual/batch.py:final_norm``). Nothing is added to the served path.

That holds under all-reduce fusion too, where a layer hands out each rank's own unreduced part: the fused
kernel completes the sum within that prepare, and the residual it returns is what the stream then holds
(``layer_boundary/fusions/allreduce.py:fused_attn_input``, ``fused_ffn_input``). What does not come to be
there is a gap: a sum that is left for later still, and batches that SGLang runs in two halves.
"""

import re
from typing import Any

import torch

from hsprobe.probes.sglang.placing import NotRecordable
from hsprobe.probes.sglang.provenance import layers_of_model
from hsprobe.probes.sglang.recorder import Recorder
from hsprobe.probes.sglang.witness import EmbeddingWitness, Handed, StageWitness, handed

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
        self._num_layers = int(runner.model_config.num_hidden_layers)
        for name, module in runner.model.named_modules():
            number = re.search(r"layers\.(\d+)$", name)
            for attribute, site in (("attn_boundary", "layer"), ("ffn_boundary", "mid")):
                boundary = vars(module).get(attribute)
                if boundary is not None and number is not None:
                    self._boundaries.append(boundary)
                    self._place_of[id(boundary)] = (site, int(number[1]))
            if name.endswith("embed_tokens") and self._recorder.settings.wants("embed"):
                module.register_forward_hook(self._embedded)
                # Another stage of a pipeline may have the embedding.
                if hasattr(module, "weight"):
                    EmbeddingWitness(self._recorder).attach(module)
        self._expect(runner.model)

    def _expect(self, model: torch.nn.Module) -> None:
        """Say what is to come by, and have it watched; a site without a place is disarmed."""
        wants, proof = self._recorder.settings.wants, self._recorder.proof
        for site in ("layer", "mid"):
            depths = sorted(depth for place, depth in self._place_of.values() if place == site)
            if not depths and wants(site):
                reason = f"it found no place in {type(model).__name__}, whose layers have no such stage"
                self._recorder.disarm(site, reason)
                continue
            end = layers_of_model(model).get("end_layer", self._num_layers)
            if site == "layer" and end == self._num_layers:
                depths.append(self._num_layers)
            wanted = [depth for depth in depths if wants(site, depth)]
            if wanted:
                proof.expect(site, wanted, compared=True, strict=True)
        for boundary in self._boundaries:
            witness = StageWitness(self._recorder, boundary, *self._place_of[id(boundary)])
            proof.watch(witness.begin, witness.end)

    def _prepared(self, result: Any, boundary: Any, hidden: Any, batch: Any, *_: Any, **__: Any) -> None:
        place = self._place_of.get(id(boundary))
        if place is None:
            return

        def take() -> None:
            if self._recorder.current(draft=False) is None:
                return
            # Not by identity: the eager runner copies every batch (``runner/eager_runner.py:load_batch``).
            if getattr(batch, "tbo_parent_token_range", None) is not None:
                raise NotRecordable("a part of the pass: SGLang ran the batch in two halves")
            stream = batch.residual_stream
            if stream.pending is not None:
                raise NotRecordable("not reduced: the stage left the sum of the ranks' parts for later")
            self._take(*place, stream.residual, is_scattered(boundary, batch))

        self._recorder.guard(place[0], take)

    def _final_norm(
        self, original: Any, hidden: Any, batch: Any, norm: Any, capture: Any = None, **kwargs: Any
    ) -> Any:
        if self._recorder.current(draft=False) is None:
            return original(hidden, batch, norm, capture, **kwargs)

        def both(residual: torch.Tensor, **ownership: Any) -> None:
            self._recorder.guard("layer", lambda: self._take("layer", self._num_layers, residual))
            if capture is not None:
                capture(residual, **ownership)

        if not self._recorder.proof.active:
            return original(hidden, batch, norm, both, **kwargs)
        before = handed(self._recorder, hidden, batch)
        result = original(hidden, batch, norm, both, **kwargs)
        self._recorder.guard("proof", lambda: self._normed(before, result, norm))
        return result

    def _normed(self, before: Handed, result: Any, norm: Any) -> None:
        self._recorder.proof.part("layer", self._num_layers, *before, result, norm)
        self._recorder.proof.final(result)

    def _take(self, site: str, depth: int, residual_TH: torch.Tensor, scattered: bool | None = None) -> None:
        labelled = self._recorder.current(draft=False)
        if labelled is not None and self._recorder.settings.wants(site, depth):
            name = f"{site}/{depth:03d}"
            self._recorder.take(labelled, name, residual_TH, site=site, depth=depth, scattered=scattered)

    def _embedded(self, module: torch.nn.Module, args: Any, output_TH: torch.Tensor) -> None:
        def take() -> None:
            labelled = self._recorder.current(draft=False)
            if labelled is not None:
                self._recorder.take(labelled, "embed", output_TH, site="embed", depth=0)

        self._recorder.guard("embed", take)


def is_scattered(boundary: Any, batch: Any) -> bool:
    """Whether, past this boundary, each rank of attention TP holds the residual of a slice of the rows.

    Raises:
        NotRecordable: the rows are spread over ranks of context parallelism.
    """
    plan = boundary.plan
    axes = {axis.name for axis in plan.edges[plan.variant_for(batch)].incoming.residual_to.sharded}
    if "ATTN_CP" in axes:
        raise NotRecordable("rows that are spread over ranks of context parallelism")
    return "ATTN_TP" in axes
