"""Hooks without SGLang's HookRegistry take hold as that one's do: both are put on the same functions."""

import sys
from types import ModuleType

import pytest

from hsprobe.probes.sglang.hooking import KINDS, Hooks, Temporary


def fresh(name: str) -> ModuleType:
    """A module with things to hook, and another that has imported one of them by its name."""
    module, other = ModuleType(name), ModuleType(f"{name}_other")
    exec(
        """
def free(x, y=1):
    "Adds."
    return x + y
class Base:
    def method(self, x): return ("method", x)
    @classmethod
    def made(cls, x): return (cls.__name__, x)
    @staticmethod
    def plain(x): return ("plain", x)
class Sub(Base): pass
""",
        module.__dict__,
    )
    other.free = module.free
    sys.modules.update({name: module, other.__name__: other})
    return module


class Theirs:
    """SGLang's own, asked in the same words."""

    def __init__(self) -> None:
        registry = pytest.importorskip(
            "sglang.srt.plugins.hook_registry", reason="this SGLang has no HookRegistry to compare with"
        )
        self._registry, self._kinds = registry.HookRegistry, registry.HookType

    def register(self, target, hook, kind) -> None:
        self._registry.register(target, hook, self._kinds[kind])

    def apply(self) -> None:
        self._registry.apply_hooks()


@pytest.fixture(params=[Hooks, Theirs], ids=["ours", "theirs"])
def hooked(request):
    name = f"hooked_{request.param.__name__.lower()}_{request.node.name.split('[')[0]}"
    module = fresh(name)
    yield module, request.param()
    del sys.modules[name], sys.modules[f"{name}_other"]


def test_kinds_do_what_they_say_also_where_the_function_was_imported_by_name(hooked):
    module, hooks = hooked
    name = module.__name__
    hooks.register(f"{name}.free", lambda result, *_, **__: ("after", result), "AFTER")
    hooks.register(f"{name}.free", lambda original, x, **more: ("around", original(x * 10, **more)), "AROUND")
    hooks.register(f"{name}.free", lambda x, **more: ((x + 1,), more), "BEFORE")
    hooks.register(f"{name}.free", lambda x, y=5: ("instead", x, y), "REPLACE")
    hooks.apply()
    expected = ("around", ("after", ("instead", 20, 2)))
    assert module.free(1, y=2) == expected
    assert sys.modules[f"{name}_other"].free(1, y=2) == expected
    assert (module.free.__name__, module.free.__doc__) == ("free", "Adds.")


def test_a_hook_that_gives_none_changes_nothing(hooked):
    module, hooks = hooked
    for kind in ("BEFORE", "AFTER"):
        hooks.register(f"{module.__name__}.free", lambda *_, **__: None, kind)
    hooks.apply()
    assert module.free(1) == 2


def test_methods_of_every_binding_and_of_subclasses(hooked):
    module, hooks = hooked
    for method in ("method", "made", "plain"):
        hooks.register(f"{module.__name__}.Base.{method}", lambda result, *_: (*result, "seen"), "AFTER")
    hooks.apply()
    assert module.Sub().method(1) == ("method", 1, "seen")
    assert module.Sub.made(1) == ("Sub", 1, "seen")
    assert module.Base.plain(1) == module.Sub().plain(1) == ("plain", 1, "seen")


def test_a_path_that_leads_nowhere_does_not_keep_the_others_from_taking_hold(hooked, caplog):
    module, hooks = hooked
    hooks.register(f"{module.__name__}.gone", lambda *_: None, "AFTER")
    hooks.register(f"{module.__name__}.Base", lambda *_: None, "AFTER")
    hooks.register(f"{module.__name__}.free", lambda result, *_: -result, "AFTER")
    hooks.apply()
    assert module.free(1) == -2
    assert isinstance(module.Base, type)


def test_hooks_take_hold_once(hooked):
    module, hooks = hooked
    hooks.register(f"{module.__name__}.free", lambda result, *_: -result, "AFTER")
    hooks.apply()
    hooks.apply()
    assert module.free(1) == -2


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="BEFORE, AFTER, AROUND, REPLACE"):
        Hooks().register("a.b", print, "DURING")
    assert len(KINDS) == 4


def test_temporary_hooks_are_there_while_they_are_needed_and_leave_nothing():
    module = fresh("hooked_for_a_time")
    before = [dict(vars(one)) for one in (module.Base, module.Sub)]
    hooks, seen = Temporary(), []

    def note(word):
        def hook(original, *args, **kwargs):
            seen.append(word)
            return original(*args, **kwargs)

        return hook

    hooks.register("hooked_for_a_time.Base.method", note("inner"))
    hooks.register("hooked_for_a_time.Base.method", note("outer"))
    hooks.register("hooked_for_a_time.Sub.method", note("of the subclass"))
    hooks.register("hooked_for_a_time.Base.nowhere", note("nowhere"))
    for purpose, needed in (("capture", True), ("graph", True), ("capture", False)):
        hooks.need(purpose, needed)
        seen.clear()
        assert module.Sub().method(3) == ("method", 3)
        assert seen == ["of the subclass", "outer", "inner"]
    hooks.need("graph", False)
    seen.clear()
    assert module.Sub().method(3) == ("method", 3)
    assert not seen
    assert [dict(vars(one)) for one in (module.Base, module.Sub)] == before


def test_a_temporary_hook_under_somebody_elses_stays_with_it():
    module = fresh("hooked_beneath")
    hooks, seen = Temporary(), []
    hooks.register(
        "hooked_beneath.Base.method", lambda original, *args: (seen.append("ours"), original(*args))[1]
    )
    hooks.need("capture", True)
    ours = module.Base.method
    module.Base.method = lambda self, x: ("theirs", ours(self, x))
    hooks.need("capture", False)
    assert module.Base().method(3) == ("theirs", ("method", 3))
    assert seen == ["ours"]
