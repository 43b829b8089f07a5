"""The few calls of CUDA's driver that recording a pass takes, each in a microsecond.

torch's own calls for the same take five to ten times as long, and between them may hand Python to another of
the server's threads. Streams and events are the driver's handles, addresses are plain numbers.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from hsprobe.probes.sglang.shared import DONE, STREAMS, Shared

_PORTABLE_AND_MAPPED = 3
_NO_TIMING = 2
_HANDLE, _ADDRESS, _SIZE = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t


class Device:
    """Copies to memory that is shared with the writer, and tells it when they are in place.

    Args:
        shared: the memory; it becomes page-locked.

    Raises:
        RuntimeError: the driver cannot do that.
    """

    def __init__(self, shared: Shared) -> None:
        torch.cuda.current_stream()
        # With a PyDLL these calls keep Python: none of them waits for the device.
        self._driver = ctypes.PyDLL("libcuda.so.1")
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(shared.map))
        self._words = shared.words
        self._ring = self._base + shared.ring_offset
        self._index = torch.cuda.current_device()
        self._tickets: dict[int, list[int]] = {}
        self._to_host = self._call("cuMemcpyDtoHAsync_v2", _HANDLE, _ADDRESS, _SIZE, _HANDLE)
        self._within = self._call("cuMemcpyDtoDAsync_v2", _ADDRESS, _ADDRESS, _SIZE, _HANDLE)
        self._write = self._call("cuStreamWriteValue64_v2", _HANDLE, _ADDRESS, ctypes.c_uint64, ctypes.c_uint)
        self._record = self._call("cuEventRecord", _HANDLE, _HANDLE)
        self._wait = self._call("cuStreamWaitEvent", _HANDLE, _HANDLE, ctypes.c_uint)
        self._wait_value = self._call(
            "cuStreamWaitValue64_v2", _HANDLE, _ADDRESS, ctypes.c_uint64, ctypes.c_uint
        )
        self._create = self._call("cuEventCreate", ctypes.POINTER(_HANDLE), ctypes.c_uint)
        register = self._call("cuMemHostRegister_v2", _HANDLE, _SIZE, ctypes.c_uint)
        address_of = self._call(
            "cuMemHostGetDevicePointer_v2", ctypes.POINTER(_ADDRESS), _HANDLE, ctypes.c_uint
        )
        _check("cuMemHostRegister", register(self._base, shared.size, _PORTABLE_AND_MAPPED))
        found = _ADDRESS()
        _check("cuMemHostGetDevicePointer", address_of(ctypes.byref(found), self._base, 0))
        self._addresses = int(found.value)

    def _call(self, name: str, *types: Any) -> Any:
        function = getattr(self._driver, name)
        function.argtypes, function.restype = types, ctypes.c_int
        return function

    def enter(self) -> None:
        """Let another thread use this object, too."""
        torch.cuda.set_device(self._index)

    def stream(self) -> int:
        """The stream on which this thread works now."""
        return int(torch._C._cuda_getCurrentRawStream(self._index))

    def read(self, offset: int, source: int, size: int, stream: int) -> None:
        """Copy `size` bytes of the device to an offset of the ring."""
        _check("cuMemcpyDtoHAsync", self._to_host(self._ring + offset, source, size, stream))

    def move(self, target: int, source: int, size: int, stream: int) -> None:
        """Copy `size` bytes within the device."""
        _check("cuMemcpyDtoDAsync", self._within(target, source, size, stream))

    def mark(self, stream: int) -> tuple[int, int]:
        """Let the device note when it has come so far; returns the stream's number and the ticket.

        The driver orders the note behind all that the stream wrote before, as other processors see it.

        Raises:
            RuntimeError: more streams than there is room for.
        """
        ticket = self._tickets.get(stream)
        if ticket is None:
            if len(self._tickets) == STREAMS:
                raise RuntimeError(f"the server runs passes on more than {STREAMS} streams")
            ticket = self._tickets[stream] = [len(self._tickets), 0]
        ticket[1] += 1
        address = self._addresses + 8 * (DONE + ticket[0])
        _check("cuStreamWriteValue64", self._write(stream, address, ticket[1], 0))
        return ticket[0], ticket[1]

    def wait_for(self, ticket: tuple[int, int], stream: int) -> None:
        """What the stream does next waits until a ticket is noted, unless it is already."""
        number, value = ticket
        if self._words[DONE + number] < value:
            address = self._addresses + 8 * (DONE + number)
            _check("cuStreamWaitValue64", self._wait_value(stream, address, value, 0))

    def event(self) -> int:
        """A new event, which has come to pass."""
        made = _HANDLE()
        _check("cuEventCreate", self._create(ctypes.byref(made), _NO_TIMING))
        return int(made.value or 0)

    def record(self, event: int, stream: int) -> None:
        """The event comes to pass when the stream has come so far."""
        _check("cuEventRecord", self._record(event, stream))

    def wait(self, stream: int, event: int) -> None:
        """What the stream does next waits for the event."""
        _check("cuStreamWaitEvent", self._wait(stream, event, 0))


def _check(name: str, code: int) -> None:
    if code:
        raise RuntimeError(f"CUDA's driver answered {name} with error {code}")
