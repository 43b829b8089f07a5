"""Hooks on SGLang's functions: through its own HookRegistry, and in the same way in a release that has none.

A hook is registered under the dotted path of a function or method, and takes hold when all are applied:

    BEFORE   ``hook(*args, **kwargs)``; None, or other (args, kwargs) to call with
    AFTER    ``hook(result, *args, **kwargs)``; None, or another result
    AROUND   ``hook(original, *args, **kwargs)``, which calls the original itself
    REPLACE  ``hook(*args, **kwargs)``, instead of the original

Several hooks of one path lie around one another in the order of their registration, around a REPLACE.
"""

import functools
import logging
import pkgutil
import sys
import types
from collections.abc import Callable
from typing import Any

from hsprobe.probes.sglang import places

logger = logging.getLogger("hsprobe")

KINDS = ("BEFORE", "AFTER", "AROUND", "REPLACE")


class Hooks:
    """Hooks that are registered first and applied once."""

    def __init__(self) -> None:
        self._registered: dict[str, list[tuple[str, Callable[..., Any]]]] = {}
        self._applied: set[str] = set()

    def register(self, target: str, hook: Callable[..., Any], kind: str) -> None:
        """Hook the function or method at a dotted path."""
        if kind not in KINDS:
            raise ValueError(f"a hook is one of {', '.join(KINDS)}, not {kind!r}")
        self._registered.setdefault(target, []).append((kind, hook))

    def apply(self) -> None:
        """Let the hooks take hold. A path that leads nowhere is logged, and the others go on."""
        for target, hooks in self._registered.items():
            if target not in self._applied:
                self._applied.add(target)
                try:
                    _apply(target, hooks)
                except Exception:
                    logger.exception("hsprobe found nothing to hook at %s", target)


def _apply(target: str, hooks: list[tuple[str, Callable[..., Any]]]) -> None:
    place, _, name = target.rpartition(".")
    holder = pkgutil.resolve_name(place)
    # A method's plain function, not what looking it up on its class makes of it.
    stored = vars(holder).get(name) if isinstance(holder, type) else None
    binding = type(stored) if isinstance(stored, classmethod | staticmethod) else None
    original = getattr(holder, name) if binding is None else stored.__func__  # type: ignore[union-attr]
    if isinstance(original, type):
        raise TypeError(f"{target} is a class; its methods can be hooked")
    wrapped = original
    for kind, hook in sorted(hooks, key=lambda one: one[0] != "REPLACE"):
        wrapped = _wrapped(wrapped, kind, hook)
    setattr(holder, name, wrapped if binding is None else binding(wrapped))
    _rebind(original, wrapped)


def _rebind(original: Any, wrapped: Any) -> None:
    """Reach the modules that have imported the function by its name."""
    for module in list(sys.modules.values()):
        if isinstance(module, types.ModuleType):
            for name, value in list(vars(module).items()):
                if value is original:
                    setattr(module, name, wrapped)


def _wrapped(original: Callable[..., Any], kind: str, hook: Callable[..., Any]) -> Callable[..., Any]:
    if kind == "REPLACE":

        def call(*args: Any, **kwargs: Any) -> Any:
            return hook(*args, **kwargs)

    elif kind == "AROUND":

        def call(*args: Any, **kwargs: Any) -> Any:
            return hook(original, *args, **kwargs)

    elif kind == "BEFORE":

        def call(*args: Any, **kwargs: Any) -> Any:
            others = hook(*args, **kwargs)
            if others is not None:
                args, kwargs = others
            return original(*args, **kwargs)

    else:

        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            other = hook(result, *args, **kwargs)
            return result if other is None else other

    return functools.wraps(original)(call)


_OURS = Hooks()


def register(target: str, hook: Callable[..., Any], kind: str) -> None:
    """Hook a function or method of SGLang; takes hold when SGLang, or `apply`, applies hooks."""
    if not places.plugins():
        _OURS.register(target, hook, kind)
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(target, hook, HookType[kind])


def apply() -> None:
    """Apply what was registered where SGLang has no HookRegistry to do it."""
    _OURS.apply()
