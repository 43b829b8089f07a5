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


class Temporary:
    """Hooks AROUND methods that are there only while they are needed, around whatever is there then.

    Where SGLang's step takes a millisecond, a hook that does nothing takes a hundredth of it.
    """

    def __init__(self) -> None:
        self._registered: list[tuple[str, Callable[..., Any]]] = []
        self._needs: set[str] = set()
        self._placed: list[tuple[Any, str, Any, Any]] = []

    def register(self, target: str, hook: Callable[..., Any]) -> None:
        """Hook the method at a dotted path; a later hook of the same lies around an earlier one."""
        self._registered.append((target, hook))

    def need(self, purpose: str, needed: bool) -> None:
        """From now on the hooks are, or are no longer, needed for a purpose."""
        (self._needs.add if needed else self._needs.discard)(purpose)
        if self._needs and not self._placed:
            self._place()
        elif not self._needs:
            self._remove()

    def _place(self) -> None:
        for target, hook in list(self._registered):
            path, _, name = target.rpartition(".")
            try:
                holder = pkgutil.resolve_name(path)
                own = vars(holder).get(name, _INHERITED)
                ours = _wrapped(getattr(holder, name), "AROUND", hook)
            except Exception:
                logger.exception("hsprobe found nothing to hook at %s", target)
                self._registered.remove((target, hook))
                continue
            setattr(holder, name, ours)
            self._placed.append((holder, name, ours, own))

    def _remove(self) -> None:
        while self._placed:
            holder, name, ours, own = self._placed.pop()
            if vars(holder).get(name) is not ours:
                # Somebody else's hook lies around it, and calls it.
                continue
            if own is _INHERITED:
                delattr(holder, name)
            else:
                setattr(holder, name, own)


_INHERITED = object()
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
