"""Puts the probes into SGLang through its own plugin hooks, and keeps their order of events."""

import logging
from typing import Any

from hsprobe.probes.sglang.draft import DraftProbe
from hsprobe.probes.sglang.layer import LayerProbe
from hsprobe.probes.sglang.logits import LogitsProbe
from hsprobe.probes.sglang.recorder import Recorder
from hsprobe.probes.sglang.settings import from_environment

logger = logging.getLogger("hsprobe")

LOAD_MODEL = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
FORWARD = "sglang.srt.model_executor.model_runner.ModelRunner.forward"
RUN_BATCH = "sglang.srt.managers.scheduler.Scheduler.run_batch"


def install() -> None:
    """Register every hook; SGLang applies them before it builds a model."""
    import sglang
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from hsprobe.probes.sglang import SUPPORTED

    if sglang.__version__ not in SUPPORTED:
        logger.warning(
            "hsprobe is tested with SGLang %s; this is %s, and a probe that does not find its place says so",
            ", ".join(SUPPORTED),
            sglang.__version__,
        )
    recorder = Recorder(from_environment())
    layer = LayerProbe(recorder)
    probes = (layer, LogitsProbe(recorder), DraftProbe(recorder))

    def loaded(result: Any, runner: Any, *_: Any, **__: Any) -> None:
        recorder.runners.append(runner)
        for probe in probes:
            recorder.guard(type(probe).__name__, lambda probe=probe: probe.attach(runner))  # type: ignore[misc]

    def forward(original: Any, runner: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.guard("pass", lambda: recorder.begin(runner, batch))
        try:
            return original(runner, batch, *args, **kwargs)
        finally:
            recorder.end()

    def run_batch(*args: Any, **_: Any) -> None:
        recorder.guard("request", lambda: recorder.requests(args[1].reqs))

    HookRegistry.register(LOAD_MODEL, loaded, HookType.AFTER)
    HookRegistry.register(FORWARD, forward, HookType.AROUND)
    HookRegistry.register(RUN_BATCH, run_batch, HookType.BEFORE)
    for target, kind, hook in layer.hooks():
        HookRegistry.register(target, hook, HookType[kind])
