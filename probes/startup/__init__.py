"""Starts the probes in the scheduler processes of an SGLang that has no plugins of its own (before 0.5.11).

Such a release spawns its schedulers as fresh interpreters, which take from their parent only the environment.
So the way in is PYTHONPATH: the folder ``path`` holds a ``sitecustomize`` that waits for SGLang's scheduler
and calls `start` in it. A release with plugins finds hsprobe by itself, and `start` leaves it alone.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PATH = Path(__file__).parent / "path"
GROUP = "hsprobe.startup"
"""Entry points that start with the probes where SGLang has none: functions without arguments."""

logger = logging.getLogger("hsprobe")


def environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """A copy of `base` (or of this process's environment) in which any SGLang's schedulers get the probes."""
    found = dict(os.environ if base is None else base)
    others = [part for part in found.get("PYTHONPATH", "").split(os.pathsep) if part and part != str(PATH)]
    found["PYTHONPATH"] = os.pathsep.join([str(PATH), *others])
    return found


def installed(*path: str) -> bool | None:
    """Whether the installed SGLang has this file or folder; None without an SGLang. Imports nothing."""
    spec = find_spec("sglang")
    folders = [] if spec is None else spec.submodule_search_locations or []
    return any(Path(folder, *path).exists() for folder in folders) if folders else None


def lacks_plugins() -> bool:
    """Whether the installed SGLang has no plugin system; False where no SGLang is installed."""
    return installed("srt", "plugins") is False


def start() -> None:
    """In a scheduler process, before SGLang begins: what its plugin system would do, for hsprobe alone."""
    if not lacks_plugins():
        return
    from hsprobe.probes.sglang import activate, hooking

    for name, begin in (("hsprobe", activate), *_others()):
        try:
            begin()
        except Exception:
            logger.exception("hsprobe could not start %s; the server goes on without it", name)
    hooking.apply()


def _others() -> Iterator[tuple[str, Callable[[], Any]]]:
    from importlib.metadata import entry_points

    for entry in entry_points(group=GROUP):
        yield entry.name, partial(_load_and_call, entry)


def _load_and_call(entry: Any) -> None:
    entry.load()()
