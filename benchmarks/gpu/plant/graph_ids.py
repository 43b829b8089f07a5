"""A fault that exists only under CUDA graphs: the decode graphs are captured with other layer ids.

SGLang 0.5.9 did this by itself (``cuda_graph_runner.py:CudaGraphRunner.__init__`` set the default ids again);
here it is planted in later releases, on the server whose environment has ``GRAPH_IDS_SHIFT``.
"""

import os

INIT = "sglang.srt.model_executor.model_runner.ModelRunner.init_decode_cuda_graph"


def install() -> None:
    """Register the fault with SGLang's plugin hooks."""
    shift = int(os.environ.get("GRAPH_IDS_SHIFT") or 0)
    if not shift:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def init(original, runner, *args, **kwargs):
        inner = getattr(runner.model, "model", None)
        ids = getattr(inner, "layers_to_capture", None)
        if runner.is_draft_worker or not ids:
            return original(runner, *args, **kwargs)
        inner.layers_to_capture = [layer + shift for layer in ids]
        try:
            return original(runner, *args, **kwargs)
        finally:
            inner.layers_to_capture = ids

    HookRegistry.register(INIT, init, HookType.AROUND)
