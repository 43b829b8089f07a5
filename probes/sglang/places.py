"""Where in SGLang the probes take hold, and which of these places the installed release has."""

from importlib.util import find_spec

import torch

LOAD_MODEL = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
FORWARD = "sglang.srt.model_executor.model_runner.ModelRunner.forward"
RUN_BATCH = "sglang.srt.managers.scheduler.Scheduler.run_batch"

_RUNNERS = (
    "sglang.srt.speculative.eagle_draft_cuda_graph_runner.EAGLEDraftCudaGraphRunner",
    "sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner.EAGLEDraftExtendCudaGraphRunner",
)
_BACKENDS = (
    "sglang.srt.model_executor.runner_backend.full_cuda_graph_backend.FullCudaGraphBackend",
    "sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend.BreakableCudaGraphBackend",
)
"""0.5.15 and later: each graph is captured and replayed by one of these."""


def residual_stream() -> bool:
    """Whether layers hand on one value and keep the residual apart (0.5.23), not a pair (0.5.15)."""
    return exists("sglang.srt.layers.layer_boundary.stage")


def graph_backends() -> list[str]:
    """Classes that capture and replay CUDA graphs; none where there is no GPU."""
    return [name for name in _BACKENDS if torch.cuda.is_available() and exists(name.rpartition(".")[0])]


def draft_graph_runners() -> list[str]:
    """``execute`` of the draft's runners, which replay its graphs without passing through `FORWARD`."""
    found = [name for name in _RUNNERS if torch.cuda.is_available() and exists(name.rpartition(".")[0])]
    return [f"{name}.execute" for name in found]


def exists(module: str) -> bool:
    """Whether a module can be found; only its packages are imported."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False
