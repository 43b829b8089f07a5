"""Opens a rank's spool, once its place among the ranks is known."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hsprobe.probes.sglang.device import Device
from hsprobe.probes.sglang.pressure import Pressure
from hsprobe.probes.sglang.ring import capacity_of
from hsprobe.probes.sglang.settings import Settings
from hsprobe.probes.sglang.spooling import Spooler
from hsprobe.probes.sglang.staging import Stage
from hsprobe.trace.place import directory_for_port, make_private, remove_leftovers
from hsprobe.trace.switch import Switch


@dataclass
class Opened:
    """Where a process records.

    Attributes:
        place: its place on each axis of the deployment.
        stage: takes the copies; None for a rank that was not asked for.
        switch: tells it to record; None for a rank that was not asked for.
    """

    place: dict[str, int]
    stage: Stage | None = None
    switch: Switch | None = None


def open_stage(settings: Settings, path: Path) -> Stage:
    """A stage that records to `path`."""
    spooler = Spooler(path, settings.max_bytes, capacity_of(settings.memory))
    device = Device(spooler.shared) if torch.cuda.is_available() else None
    return Stage(spooler, Pressure(settings.sampling.on_pressure), device)


def open_rank(settings: Settings, runners: Sequence[Any], scheduler: Any) -> Opened:
    """Open this process's spool; `runners` are its loaded ModelRunners, `scheduler` is what runs them.

    Raises:
        OSError: the folder cannot be made, or is not private.
        RuntimeError: the device cannot copy to the writer's memory.
    """
    from hsprobe.probes.sglang.provenance import coordinates, describe, layers_of, replica_of

    replicas = int(getattr(runners[0].server_args, "dp_size", 1) or 1)
    opened = Opened(coordinates(replica_of(scheduler), replicas))
    place = opened.place
    if settings.ranks is not None and place["rank"] not in settings.ranks:
        return opened
    directory = settings.directory
    if directory is None:
        directory = directory_for_port(int(runners[0].server_args.port))
        make_private(directory.parent)
        remove_leftovers(directory)
    make_private(directory)
    name = "-".join(f"{axis}{place[axis]}" for axis in ("pp", "dp", "tp"))
    opened.switch = Switch(directory)
    opened.stage = open_stage(settings, directory / f"{name}-{os.getpid()}.spool")
    asked = None if settings.ranks is None else sorted(settings.ranks)
    hello = {
        **place,
        **layers_of(runners),
        "ranks": asked,
        "pid": os.getpid(),
        "provenance": describe(runners, settings),
    }
    # What is handed to the writer is plain data.
    opened.stage.spooler.put("hello", json.loads(json.dumps(hello)))
    return opened
