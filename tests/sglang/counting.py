"""A plugin for SGLang's processes: how many collectives each batch issued, one line of JSON a batch.

A batch ends where the next begins, so that what a scheduler does between the two counts too. Only the
broadcasts by which rank 0 hands on requests are left out: a scheduler issues one each time it looks for some.
"""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch.distributed as dist

FOLDER = "HSPROBE_TEST_COLLECTIVES"
_RUN_BATCH = "sglang.srt.managers.scheduler.Scheduler.run_batch"
_RECEIVE = "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver.recv_requests"
_NAMES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all",
    "all_to_all_single", "barrier", "broadcast", "broadcast_object_list", "gather", "gather_object",
    "irecv", "isend", "monitored_barrier", "recv", "reduce", "reduce_scatter", "reduce_scatter_tensor",
    "scatter", "send",
)  # fmt: skip

_calls: Counter[str] = Counter()
_batch: dict[str, Any] = {}
_receiving = False


def install() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for name in _NAMES:
        setattr(dist, name, _counted(name, getattr(dist, name)))
    HookRegistry.register(_RUN_BATCH, _begins, HookType.BEFORE)
    HookRegistry.register(_RECEIVE, _receives, HookType.AROUND)


def _counted(name: str, call: Any) -> Any:
    def counted(*args: Any, **kwargs: Any) -> Any:
        if not _receiving:
            _calls[name] += 1
        return call(*args, **kwargs)

    return counted


def _begins(scheduler: Any, batch: Any, *_: Any, **__: Any) -> None:
    if _batch:
        with (Path(os.environ[FOLDER]) / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps({**_batch, "calls": dict(_calls)}) + "\n")
    _calls.clear()
    rows = batch.extend_num_tokens if batch.forward_mode.is_extend() else 0
    _batch.update(mode=batch.forward_mode.name, requests=len(batch.reqs), rows=rows)


def _receives(receive: Any, *args: Any, **kwargs: Any) -> Any:
    global _receiving
    _receiving = True
    try:
        return receive(*args, **kwargs)
    finally:
        _receiving = False
