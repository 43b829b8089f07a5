"""Sites ``layer``, ``mid`` and ``embed`` of SGLang up to 0.5.22, where a layer returns a pair.

There the state after a layer is ``hidden + residual``, and the next layer's first norm does the addition:
``RMSNorm.forward(hidden, residual)`` returns the normed sum and the sum itself
(``models/llama.py:LlamaDecoderLayer.forward``; ``layers/layernorm.py``). Models with a ``LayerCommunicator``
reduce over ranks before that norm, in ``prepare_attn`` and ``prepare_mlp`` (``layers/communicator.py``),
which return the same pair. The last depth comes from the final norm. Nothing is added to the served path.
"""

import re
from typing import Any

import torch

from hsprobe.probes.sglang.placing import NotRecordable
from hsprobe.probes.sglang.recorder import Recorder
from hsprobe.probes.sglang.witness import EmbeddingWitness, NormWitness, PreparedWitness

COMMUNICATOR = "sglang.srt.layers.communicator.LayerCommunicator"
PREPARED = (("prepare_attn", "layer"), ("prepare_mlp", "mid"))
NORMS = (("input_layernorm", "layer"), ("post_attention_layernorm", "mid"))


class NormProbe:
    """Takes depth d where layer d's first norm has added the residual, and depth L at the final norm."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._layer_of: dict[int, int] = {}
        self._communicators: list[Any] = []
        self._alone = False
        self._witnesses: list[tuple[str, int, PreparedWitness | NormWitness]] = []

    def hooks(self) -> list[tuple[str, str, Any]]:
        """(target, hook type, function) for SGLang's HookRegistry."""
        if not self._recorder.settings.sites & {"layer", "mid"}:
            return []
        return [(f"{COMMUNICATOR}.{name}", "AFTER", self._prepared(site)) for name, site in PREPARED]

    def attach(self, runner: Any) -> None:
        """Hook the norms of a loaded target, and its embedding.

        Raises:
            LookupError: the model has no layers, or no final norm, that could be told.
        """
        if runner.is_draft_worker:
            return
        wants = self._recorder.settings.wants
        self._alone = int(getattr(runner, "tp_size", 0)) == 1
        layers = [
            (int(found[1]), module)
            for name, module in runner.model.named_modules()
            if (found := re.search(r"layers\.(\d+)$", name)) is not None
        ]
        for name, module in runner.model.named_modules():
            if name.endswith("embed_tokens") and wants("embed"):
                module.register_forward_hook(self._embedded)
                # Another stage of a pipeline may have the embedding.
                if hasattr(module, "weight"):
                    EmbeddingWitness(self._recorder).attach(module)
        if not self._recorder.settings.sites & {"layer", "mid"}:
            return
        for number, layer in layers:
            self._watch(number, layer)
        final = next(
            (m for name, m in runner.model.named_modules() if re.search(r"model\.norm$", name)), None
        )
        if final is None or not layers:
            raise LookupError(f"{type(runner.model).__name__} has no final norm after its layers")
        self._watch_norm(final, "layer", int(runner.model_config.num_hidden_layers), final=True)
        self._expect(runner.model)

    def _expect(self, model: torch.nn.Module) -> None:
        """Say what is to come by, and have it watched; a site without a place is disarmed."""
        settings, proof = self._recorder.settings, self._recorder.proof
        for lacking in settings.sites & {"layer", "mid"} - {site for site, _, _ in self._witnesses}:
            reason = f"it found no place in {type(model).__name__}, whose layers have no such norm"
            self._recorder.disarm(lacking, reason)
        for site, depth, witness in self._witnesses:
            if settings.wants(site, depth):
                proof.expect(site, [depth], compared=True, strict=True)
                proof.watch(witness.begin, witness.end)

    def _watch(self, number: int, layer: torch.nn.Module) -> None:
        communicator = getattr(layer, "layer_communicator", None)
        if communicator is not None:
            self._communicators.append(communicator)
            self._layer_of[id(communicator)] = number
            for method, site in PREPARED:
                found = PreparedWitness(self._recorder, communicator, method, site, number, self._alone)
                self._witnesses.append((site, number, found))
            return
        for name, site in NORMS:
            norm = getattr(layer, name, None)
            if isinstance(norm, torch.nn.Module):
                self._watch_norm(norm, site, number)

    def _watch_norm(self, norm: torch.nn.Module, site: str, depth: int, *, final: bool = False) -> None:
        norm.register_forward_hook(lambda module, args, output: self._normed(site, depth, args, output))
        # Another stage of a pipeline may have the final norm.
        if hasattr(norm, "weight"):
            found = NormWitness(self._recorder, norm, site, depth, alone=self._alone, final=final)
            self._witnesses.append((site, depth, found))

    def _prepared(self, site: str) -> Any:
        def after(result: Any, communicator: Any, *args: Any, **kwargs: Any) -> None:
            number = self._layer_of.get(id(communicator))
            if number is None:
                return

            def take() -> None:
                # (hidden_states, residual, forward_batch), by place or by name.
                batch = args[2] if len(args) > 2 else kwargs["forward_batch"]
                if getattr(batch, "tbo_parent_token_range", None) is not None:
                    raise NotRecordable("a part of the pass: SGLang ran the batch in two halves")
                self._take(site, number, result[1])

            self._recorder.guard(site, take)

        return after

    def _normed(self, site: str, depth: int, args: Any, output: Any) -> None:
        def take() -> None:
            # Before the first layer there is no residual yet: the norm's input is the state.
            self._take(site, depth, output[1] if isinstance(output, tuple) else args[0])

        self._recorder.guard(site, take)

    def _take(self, site: str, depth: int, state_TH: torch.Tensor) -> None:
        labelled = self._recorder.current(draft=False)
        if labelled is not None and self._recorder.settings.wants(site, depth):
            self._recorder.take(labelled, f"{site}/{depth:03d}", state_TH, site=site, depth=depth)

    def _embedded(self, module: torch.nn.Module, args: Any, output_TH: torch.Tensor) -> None:
        def take() -> None:
            labelled = self._recorder.current(draft=False)
            if labelled is not None:
                self._recorder.take(labelled, "embed", output_TH, site="embed", depth=0)

        self._recorder.guard("embed", take)
