"""Python runs this at its start in every process below ``hsprobe run``, where this folder is on PYTHONPATH.

It costs a process that runs no SGLang a few microseconds: nothing is imported until SGLang's scheduler is.
Then the function with which a scheduler process begins is wrapped, so that the probes start in that process
and in no other. A ``sitecustomize`` that this one hides runs after it.
"""

from __future__ import annotations

import os
import sys

# The module `typing` is not imported for it: this runs in every Python process.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_SCHEDULER = "sglang.srt.managers.scheduler"
_BEGINS = "run_scheduler_process"


class _Watcher:
    """Finds the scheduler's module as the other finders do, to see it when it has been executed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != _SCHEDULER:
            return None
        for finder in sys.meta_path:
            look = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if look is None else look(name, path, target)
            if spec is not None:
                _see(spec.loader)
                return spec
        return None


def _see(loader: Any) -> None:
    execute = getattr(loader, "exec_module", None)
    if execute is None:
        return

    def exec_module(module: Any) -> None:
        execute(module)
        _wrap(module)

    loader.exec_module = exec_module


def _wrap(module: Any) -> None:
    """Before anybody has the function: what others import, and pickle by its name, is the wrapped one."""
    original = getattr(module, _BEGINS, None)
    if original is None:
        return
    import functools

    @functools.wraps(original)
    def begin(*args: Any, **kwargs: Any) -> Any:
        try:
            from hsprobe.probes.startup import start
        except ImportError as error:
            print(f"hsprobe: {sys.executable} has no hsprobe ({error}); no probes run", file=sys.stderr)
        else:
            start()
        return original(*args, **kwargs)

    setattr(module, _BEGINS, begin)


def _hidden() -> None:
    """Run the sitecustomize that would have run without this folder."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    here = os.path.dirname(__file__)  # noqa: PTH120 (pathlib is not imported yet)
    rest = [entry for entry in sys.path if entry.rstrip(os.sep) != here]
    spec = PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        found = module_from_spec(spec)
        sys.modules["sitecustomize"] = found
        spec.loader.exec_module(found)


sys.meta_path.insert(0, _Watcher())
_hidden()
