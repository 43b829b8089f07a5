"""Where in SGLang the probes take hold, and which of these places the installed release has."""

from importlib.util import find_spec

LOAD_MODEL = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
FORWARD = "sglang.srt.model_executor.model_runner.ModelRunner.forward"
RUN_BATCH = "sglang.srt.managers.scheduler.Scheduler.run_batch"

_RUNNERS = (
    "sglang.srt.speculative.eagle_draft_cuda_graph_runner.EAGLEDraftCudaGraphRunner",
    "sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner.EAGLEDraftExtendCudaGraphRunner",
)
_CLOSED = (
    "sglang.srt.model_executor.cuda_graph_runner.CudaGraphRunner",
    "sglang.srt.model_executor.piecewise_cuda_graph_runner.PiecewiseCudaGraphRunner",
    *_RUNNERS,
)
"""Where there are no backends (up to 0.5.10), each of these captures and replays by itself."""
_BACKENDS = (
    "sglang.srt.model_executor.runner_backend.full_cuda_graph_backend.FullCudaGraphBackend",
    "sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend.BreakableCudaGraphBackend",
)
"""0.5.15 and later: each graph is captured and replayed by one of these."""


def plugins() -> bool:
    """Whether SGLang has plugins, and with them a HookRegistry (0.5.11 and later)."""
    return exists("sglang.srt.plugins.hook_registry")


def runtime_context() -> bool:
    """Whether one object knows this process's place among the ranks; in 0.5.9 functions do."""
    return exists("sglang.srt.runtime_context")


def residual_stream() -> bool:
    """Whether layers hand on one value and keep the residual apart (0.5.23), not a pair (0.5.15)."""
    return exists("sglang.srt.layers.layer_boundary.stage")


def graph_backends() -> list[str]:
    """Classes that capture and replay CUDA graphs; none where there is no GPU."""
    return [name for name in _BACKENDS if _on_gpu() and exists(name.rpartition(".")[0])]


def draft_graph_runners() -> list[str]:
    """What replays the draft's graphs without passing through `FORWARD`: its runners' own method."""
    found = [name for name in _RUNNERS if _on_gpu() and exists(name.rpartition(".")[0])]
    return [f"{name}.{'execute' if _backends_exist() else 'replay'}" for name in found]


def closed_graph_runners() -> list[str]:
    """Classes whose graphs the probes cannot get their copies into."""
    if not _on_gpu() or _backends_exist():
        return []
    return [name for name in _CLOSED if exists(name.rpartition(".")[0])]


def _on_gpu() -> bool:
    # Imported here: where the probes start, a process has not imported it yet.
    import torch

    return torch.cuda.is_available()


def _backends_exist() -> bool:
    return any(exists(name.rpartition(".")[0]) for name in _BACKENDS)


def exists(module: str) -> bool:
    """Whether a module can be found; only its packages are imported."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False
