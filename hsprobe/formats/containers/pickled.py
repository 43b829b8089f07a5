"""Reads the pickle of a torch file as data: no import, no call, no object but lists, mappings and marks.

An object of a class not known here becomes an `Opaque`, whatever it would have done. Sizes are bounded by the
size of the pickle itself.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MAX_BYTES = 4 << 20
_MARK = object()
_U8, _U16, _U32, _U64 = (struct.Struct(code) for code in ("<B", "<H", "<I", "<Q"))
_I32 = struct.Struct("<i")


@dataclass(frozen=True)
class Name:
    """A class or function that the pickle names. It is not imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False)
class Opaque:
    """An object that would have been made by calling `what`."""

    what: object
    state: object = None


Call = Callable[[object, object], object]
"""(what is called, its arguments) -> the value to put in its place."""
Persistent = Callable[[object], object]
"""persistent id -> the value it stands for."""


class PickleError(Exception):
    """The pickle cannot be read; the message is the end of a sentence."""


def read(data: bytes, call: Call, persistent: Persistent) -> Any:
    """The value that a pickle of protocol 2 or later describes.

    Raises:
        PickleError: it is damaged, too large, or of an older protocol.
    """
    if len(data) > MAX_BYTES:
        raise PickleError(f"its structure alone takes {len(data):,} bytes")
    machine = _Machine(data, call, persistent)
    try:
        return machine.run()
    except (IndexError, struct.error, UnicodeDecodeError, KeyError, TypeError, ValueError) as error:
        raise PickleError("its structure makes no sense") from error


class _Machine:
    def __init__(self, data: bytes, call: Call, persistent: Persistent) -> None:
        self.data = data
        self.at = 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.call = call
        self.persistent = persistent

    def run(self) -> Any:
        handlers, data = _HANDLERS, self.data
        while True:
            code = data[self.at]
            self.at += 1
            if code == 0x2E:  # STOP
                return self.stack.pop()
            handler = handlers.get(code)
            if handler is None:
                raise PickleError(f"its structure uses pickle opcode 0x{code:02x}, which no torch file needs")
            handler(self)

    def take(self, count: int) -> bytes:
        if count < 0 or self.at + count > len(self.data):
            raise PickleError("its structure is cut short")
        found = self.data[self.at : self.at + count]
        self.at += count
        return found

    def number(self, code: struct.Struct) -> int:
        found: int = code.unpack_from(self.data, self.at)[0]
        self.at += code.size
        return found

    def line(self) -> str:
        end = self.data.index(b"\n", self.at)
        found = self.data[self.at : end].decode("utf-8")
        self.at = end + 1
        return found

    def since_mark(self) -> list[Any]:
        at = len(self.stack) - 1
        while self.stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise PickleError("its structure makes no sense")
        found = self.stack[at + 1 :]
        del self.stack[at:]
        return found

    def push(self, value: Any) -> None:
        self.stack.append(value)

    # What changes more than the stack.

    def memoize(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def set_items(self, pairs: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict):
            return
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            # Nothing else is hashed: a nest of tuples may take for ever.
            if isinstance(key, str | int):
                target[key] = value

    def append_items(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, list):
            target.extend(values)

    def reduce(self) -> None:
        arguments, what = self.stack.pop(), self.stack.pop()
        self.push(self.call(what, arguments))

    def new_object(self, *, keywords: bool = False) -> None:
        if keywords:
            self.stack.pop()
        self.stack.pop()
        self.push(Opaque(self.stack.pop()))

    def build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, Opaque):
            target.state = state

    def stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if not (isinstance(name, str) and isinstance(module, str)):
            raise PickleError("its structure makes no sense")
        self.push(Name(module, name))

    def tuple_of(self, count: int) -> None:
        if count > len(self.stack):
            raise PickleError("its structure makes no sense")
        found = tuple(self.stack[len(self.stack) - count :])
        del self.stack[len(self.stack) - count :]
        self.push(found)


def _long(machine: _Machine, count: int) -> None:
    if count > 64:
        raise PickleError("it holds a number of absurd size")
    machine.push(int.from_bytes(machine.take(count), "little", signed=True))


def _text(machine: _Machine, count: int) -> None:
    machine.push(machine.take(count).decode("utf-8", "surrogatepass"))


def _set_item(machine: _Machine) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    machine.set_items([key, value])


def _append(machine: _Machine) -> None:
    value = machine.stack.pop()
    machine.append_items([value])


def _mapping(machine: _Machine) -> None:
    pairs = machine.since_mark()
    machine.push({})
    machine.set_items(pairs)


def _object(machine: _Machine) -> None:
    machine.push(Opaque(machine.since_mark()[0]))


# Opcode -> what it does; see pickletools in the standard library for their meaning.
_HANDLERS: dict[int, Callable[[_Machine], object]] = {
    0x80: lambda m: m.take(1),  # PROTO
    0x95: lambda m: m.take(8),  # FRAME
    0x28: lambda m: m.push(_MARK),
    0x30: lambda m: m.stack.pop(),  # POP
    0x31: lambda m: m.since_mark(),  # POP_MARK
    0x32: lambda m: m.push(m.stack[-1]),  # DUP
    0x4E: lambda m: m.push(None),
    0x88: lambda m: m.push(True),
    0x89: lambda m: m.push(False),
    0x4A: lambda m: m.push(m.number(_I32)),
    0x4B: lambda m: m.push(m.number(_U8)),
    0x4D: lambda m: m.push(m.number(_U16)),
    0x8A: lambda m: _long(m, m.number(_U8)),
    0x8B: lambda m: _long(m, m.number(_I32)),
    0x47: lambda m: m.push(struct.unpack(">d", m.take(8))[0]),
    0x58: lambda m: _text(m, m.number(_U32)),
    0x8C: lambda m: _text(m, m.number(_U8)),
    0x8D: lambda m: _text(m, m.number(_U64)),
    0x55: lambda m: m.push(m.take(m.number(_U8))),  # SHORT_BINSTRING
    0x54: lambda m: m.push(m.take(m.number(_I32))),
    0x42: lambda m: m.push(m.take(m.number(_U32))),
    0x43: lambda m: m.push(m.take(m.number(_U8))),
    0x8E: lambda m: m.push(m.take(m.number(_U64))),
    0x7D: lambda m: m.push({}),
    0x5D: lambda m: m.push([]),
    0x29: lambda m: m.push(()),
    0x8F: lambda m: m.push([]),  # EMPTY_SET
    0x90: lambda m: m.append_items(m.since_mark()),  # ADDITEMS
    0x91: lambda m: m.push(m.since_mark()),  # FROZENSET
    0x64: _mapping,
    0x6C: lambda m: m.push(m.since_mark()),  # LIST
    0x74: lambda m: m.push(tuple(m.since_mark())),
    0x85: lambda m: m.tuple_of(1),
    0x86: lambda m: m.tuple_of(2),
    0x87: lambda m: m.tuple_of(3),
    0x73: _set_item,
    0x75: lambda m: m.set_items(m.since_mark()),
    0x61: _append,
    0x65: lambda m: m.append_items(m.since_mark()),
    0x71: lambda m: m.memoize(m.number(_U8)),
    0x72: lambda m: m.memoize(m.number(_U32)),
    0x94: lambda m: m.memoize(len(m.memo)),
    0x68: lambda m: m.push(m.memo[m.number(_U8)]),
    0x6A: lambda m: m.push(m.memo[m.number(_U32)]),
    0x63: lambda m: m.push(Name(m.line(), m.line())),
    0x93: lambda m: m.stack_global(),
    0x52: lambda m: m.reduce(),
    0x81: lambda m: m.new_object(),
    0x92: lambda m: m.new_object(keywords=True),  # NEWOBJ_EX
    0x6F: _object,
    0x62: lambda m: m.build(),
    0x51: lambda m: m.push(m.persistent(m.stack.pop())),
}
