"""Runs a target with transformers, one request at a time and without a cache, and writes a trace.

Shapes: T tokens of a request, H hidden size, K chunks.
Source for what the states mean: ``transformers/utils/output_capturing.py``: ``hidden_states[d]`` is the
input of layer d for d < L; entry L is overwritten by the state after the final norm, so the residual
stream after the last layer is read from the final norm's input instead.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from hsprobe.errors import HsprobeError
from hsprobe.probes.experts import experts_of
from hsprobe.trace.context import context_hashes
from hsprobe.trace.schema import CaptureMode, Model, Phase, RowStatus
from hsprobe.trace.writer import TraceWriter


class PromptLike(Protocol):
    """A prompt as token ids or as text."""

    @property
    def input_ids(self) -> tuple[int, ...] | None: ...

    @property
    def text(self) -> str | None: ...


@dataclass(frozen=True)
class ReferencePlan:
    """What to record.

    Attributes:
        model: folder of the target.
        out: the trace to write.
        layers: layer ids whose outputs to keep as aux chunks, in this order (-1 is the embedding);
            ``None`` keeps every depth instead.
        max_new_tokens: tokens to generate greedily after each prompt; their rows are recorded too.
        dtype: ``"auto"`` (the checkpoint's), ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        device: torch's name of the device.
    """

    model: Path
    out: Path
    layers: Sequence[int] | None = None
    max_new_tokens: int = 0
    dtype: str = "auto"
    device: str = "cpu"


@dataclass(frozen=True)
class _States:
    """``[T, H]`` each: the stream at depths 0..L, after each layer's attention, and after the final norm."""

    layers: list[torch.Tensor]
    mids: list[torch.Tensor]
    final: torch.Tensor


class _Target:
    """The loaded model and the taps on it."""

    def __init__(self, plan: ReferencePlan) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
        if not (plan.model / "config.json").is_file():
            raise HsprobeError(f"{plan.model} is not a model folder.", "Give the folder with config.json.")
        dtype: Any = plan.dtype if plan.dtype == "auto" else getattr(torch, plan.dtype)
        try:
            self.model = AutoModelForCausalLM.from_pretrained(plan.model, dtype=dtype, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            first = str(error).strip().splitlines()[0]
            raise HsprobeError(
                f"transformers cannot load {plan.model}: {first}", "Check the folder's files."
            ) from None
        self.model.eval().to(plan.device)
        self.decoder = self.model.get_decoder()
        self.num_layers = len(self.decoder.layers)
        self._before: dict[int, torch.Tensor] = {}
        self._keep_input_of(self.num_layers, self.decoder.norm)
        for number, layer in enumerate(self.decoder.layers):
            # Models with four norms a layer (Gemma) norm the attention's output before it is added.
            norm = getattr(layer, "pre_feedforward_layernorm", None) or layer.post_attention_layernorm
            self._keep_input_of(number, norm)

    def _keep_input_of(self, place: int, norm: torch.nn.Module) -> None:
        def keep(module: torch.nn.Module, args: Any) -> None:
            self._before[place] = args[0]

        norm.register_forward_pre_hook(keep)

    @torch.inference_mode()
    def extend(self, ids: list[int], max_new_tokens: int) -> list[int]:
        """The prompt followed by ``max_new_tokens`` greedily chosen tokens."""
        if max_new_tokens == 0:
            return ids
        prompt = torch.tensor([ids], device=self.model.device)
        made = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            min_new_tokens=max_new_tokens,
            pad_token_id=0,
        )
        return [int(token) for token in made[0]]

    @torch.inference_mode()
    def states(self, ids: list[int]) -> "_States":
        """The residual stream of one request."""
        result = self.decoder(
            torch.tensor([ids], device=self.model.device), output_hidden_states=True, use_cache=False
        )
        inner = [state[0] for state in result.hidden_states[: self.num_layers]]
        return _States(
            layers=[*inner, self._before[self.num_layers][0]],
            mids=[self._before[number][0] for number in range(self.num_layers)],
            final=result.last_hidden_state[0],
        )

    def provenance(self, plan: ReferencePlan) -> dict[str, Any]:
        """The producer's facts."""
        import transformers

        config = self.model.config
        return {
            "producer": "transformers",
            "transformers_version": transformers.__version__,
            "torch_version": torch.__version__,
            "model": {
                "path": str(plan.model),
                "architecture": (config.architectures or [type(self.model).__name__])[0],
                "num_layers": self.num_layers,
                "hidden_size": int(config.hidden_size),
                "dtype": str(self.model.dtype).removeprefix("torch."),
                "experts": experts_of(config),
                "config_sha256": hashlib.sha256((plan.model / "config.json").read_bytes()).hexdigest(),
            },
            "layers": None if plan.layers is None else list(plan.layers),
        }


def capture_reference(
    plan: ReferencePlan, prompts: Sequence[PromptLike], on_request: Callable[[int, int], None]
) -> int:
    """Write the trace and return its number of rows; ``on_request`` gets (done, total).

    Raises:
        HsprobeError: the model cannot be loaded, a layer id does not exist, or text came without a tokenizer.
    """
    target = _Target(plan)
    depths = None if plan.layers is None else [layer + 1 for layer in plan.layers]
    if depths is not None and not all(0 <= depth <= target.num_layers for depth in depths):
        raise HsprobeError(
            f"--layers {','.join(map(str, plan.layers or ()))} names a layer that the model lacks.",
            f"It has layers 0 to {target.num_layers - 1}; -1 stands for the embedding.",
        )
    encode = _encoder(plan.model)
    n_rows, requests, prompt_lens = 0, [], []
    with TraceWriter(plan.out, target.provenance(plan)) as writer:
        writer.add_rank(0, {"tp": 0, "pp": 0, "dp": 0, "attn_tp": 0})
        for number, prompt in enumerate(prompts):
            start = list(prompt.input_ids) if prompt.input_ids is not None else encode(prompt.text or "")
            ids = target.extend(start, plan.max_new_tokens)
            _write_request(writer, number, ids, target.states(ids), depths)
            requests.append(ids)
            prompt_lens.append(len(start))
            n_rows += len(ids)
            on_request(number + 1, len(prompts))
        writer.set_requests([f"r{i}" for i in range(len(requests))], requests, prompt_lens)
        writer.set_gaps([])
    return n_rows


def _encoder(model: Path) -> Callable[[str], list[int]]:
    loaded: list[Any] = []

    def encode(text: str) -> list[int]:
        if not loaded:
            from transformers import AutoTokenizer

            try:
                loaded.append(AutoTokenizer.from_pretrained(model, local_files_only=True))
            except (OSError, ValueError):
                raise HsprobeError(
                    f"{model} has no tokenizer for prompts given as text.", "Give prompts with input_ids."
                ) from None
        return [int(token) for token in loaded[0](text)["input_ids"]]

    return encode


def _write_request(
    writer: TraceWriter,
    number: int,
    ids: list[int],
    states: _States,
    depths: list[int] | None,
) -> None:
    n_rows = len(ids)
    writer.add_passes(
        0,
        {
            "id": np.array([number]),
            "model": np.array([int(Model.TARGET)]),
            "phase": np.array([int(Phase.PREFILL)]),
            "mode": np.array([int(CaptureMode.FULL)]),
            "n_rows": np.array([n_rows]),
            "time": np.array([time.time()]),
        },
    )
    first = writer.append_rows(
        0,
        {
            "pass": np.full(n_rows, number),
            "request": np.full(n_rows, number),
            "position": np.arange(n_rows),
            "token": np.array(ids),
            "context": np.array(context_hashes(ids), dtype=np.uint64),
            "status": np.full(n_rows, int(RowStatus.PLAIN)),
        },
    )
    rows = np.arange(first, first + n_rows)
    dtype = str(states.final.dtype).removeprefix("torch.")
    if depths is not None:
        aux = torch.cat([states.layers[depth] for depth in depths], dim=-1)
        writer.append(0, "aux", _bits(aux), rows, site="aux", dtype=dtype, depths=depths, chunks=len(depths))
        return
    for site, tensors in (("layer", states.layers), ("mid", states.mids)):
        for depth, state in enumerate(tensors):
            name = f"{site}/{depth:03d}"
            writer.append(0, name, _bits(state), rows, site=site, dtype=dtype, depth=depth)
    writer.append(0, "final", _bits(states.final), rows, site="final", dtype=dtype, depth="final")


def _bits(state: torch.Tensor) -> np.ndarray[Any, Any]:
    """The tensor's own bits; numpy has no bfloat16, so those travel as uint16."""
    state = state.detach().cpu().contiguous()
    if state.dtype == torch.bfloat16:
        return state.view(torch.uint16).numpy()
    return state.numpy()
