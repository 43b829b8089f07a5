"""Takes hsprobe out of a running server, and puts it in again: what it costs can be seen in one process.

While a file ``unhooked`` lies in the server's spool folder, SGLang's methods are what they were before
hsprobe was loaded. Two servers without hsprobe may differ by more than hsprobe costs.
"""

import os
import pkgutil
import sys
import threading
import time
from pathlib import Path

TICK_SECONDS = 0.05


def install() -> None:
    """Begin to look for the file; in processes that run a model only."""
    if "sglang.srt.managers.scheduler" in sys.modules and os.environ.get("HSPROBE_CAPTURE"):
        threading.Thread(target=_watch, daemon=True).start()


def _watch() -> None:
    flag = Path(os.environ["HSPROBE_CAPTURE"], "unhooked")
    hooked: dict[tuple[object, str], object] = {}
    while True:
        time.sleep(TICK_SECONDS)
        if flag.exists() and not hooked:
            hooked = _unhook()
            flag.with_name("unhooked-now").touch()
        elif hooked and not flag.exists():
            for (owner, name), function in hooked.items():
                setattr(owner, name, function)
            hooked = {}
            flag.with_name("unhooked-now").unlink()


def _unhook() -> dict[tuple[object, str], object]:
    """Put the original methods back; returns hsprobe's, by owner and name."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    found = {}
    for target in HookRegistry._patched:
        path, _, name = target.rpartition(".")
        owner = pkgutil.resolve_name(path)
        original = getattr(owner.__dict__.get(name), "__wrapped__", None)
        if original is not None:
            found[owner, name] = owner.__dict__[name]
            setattr(owner, name, original)
    return found
