"""Puts the probes into SGLang, and keeps their order of events."""

import logging
from typing import Any

from hsprobe.probes.sglang import hooking, places
from hsprobe.probes.sglang.draft import DraftProbe
from hsprobe.probes.sglang.layer import LayerProbe
from hsprobe.probes.sglang.logits import LogitsProbe
from hsprobe.probes.sglang.norms import NormProbe
from hsprobe.probes.sglang.opening import open_rank
from hsprobe.probes.sglang.recorder import Recorder
from hsprobe.probes.sglang.settings import from_environment

logger = logging.getLogger("hsprobe")


def install() -> None:
    """Register every hook; they are applied before SGLang builds a model."""
    _warn_of_another_version()
    schedulers: list[Any] = []
    recorder = Recorder(
        from_environment(), lambda settings, runners: open_rank(settings, runners, schedulers[-1])
    )
    layer = LayerProbe(recorder) if places.residual_stream() else NormProbe(recorder)
    probes = (layer, LogitsProbe(recorder), DraftProbe(recorder))

    def loaded(result: Any, runner: Any, *_: Any, **__: Any) -> None:
        recorder.runners.append(runner)
        for probe in probes:
            recorder.guard(type(probe).__name__, probe.attach, runner)

    def forward(original: Any, runner: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.guard("pass", recorder.begin, runner, batch)
        try:
            return original(runner, batch, *args, **kwargs)
        finally:
            recorder.end()

    def execute(original: Any, graphs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        # A draft's decode graph makes its own token ids, step by step.
        with_ids = batch.forward_mode.name != "DECODE"
        recorder.guard("pass", recorder.begin, graphs.model_runner, batch, with_ids)
        try:
            return original(graphs, batch, *args, **kwargs)
        finally:
            recorder.end()

    def run_batch(scheduler: Any, batch: Any, *_: Any, **__: Any) -> None:
        if not schedulers:
            schedulers.append(scheduler)
        recorder.guard("request", recorder.step, batch.reqs)

    hooking.register(places.LOAD_MODEL, loaded, "AFTER")
    hooking.register(places.RUN_BATCH, run_batch, "BEFORE")
    recorder.hooks.register(places.FORWARD, forward)
    _register_graphs(recorder, execute)
    for target, kind, hook in layer.hooks():
        hooking.register(target, hook, kind)


def _register_graphs(recorder: Recorder, execute: Any) -> None:
    graphs, hooks = recorder.graphs, recorder.hooks
    for runner in places.closed_graph_runners():
        hooking.register(f"{runner}.capture", graphs.closed_capture, "AROUND")
        hooks.register(f"{runner}.replay", graphs.closed_replay)
    # Around those, so that the pass is known when its graph runs.
    for target in places.draft_graph_runners():
        hooks.register(target, execute)
    for backend in places.graph_backends():
        hooking.register(f"{backend}.capture_one", graphs.capture_one, "AROUND")
        hooks.register(f"{backend}.replay", graphs.replay)


def _warn_of_another_version() -> None:
    import sglang

    from hsprobe.probes.sglang import SUPPORTED

    if sglang.__version__ not in SUPPORTED:
        logger.warning(
            "hsprobe supports SGLang %s; this is %s, recorded as the newest of them is: the trace says which "
            "probes found their place, and which were disarmed",
            ", ".join(SUPPORTED),
            sglang.__version__,
        )
