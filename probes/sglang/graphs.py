"""Capture inside CUDA graphs: each graph a second time with the probes' copies in it, read after each replay.

SGLang captures each batch shape through its backend's ``capture_one`` and runs it through ``replay``
(``model_executor/runner_backend``). hsprobe lets it capture the graph as it is, and then once more, with
copies, under a key of its own. A pass that is to be recorded replays the second, any other pass the first,
so a server whose probes are not armed runs exactly what it would run without them.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from hsprobe.probes.sglang.gather import prepare
from hsprobe.probes.sglang.labels import Form, Pass
from hsprobe.probes.sglang.shared import Tickets
from hsprobe.probes.sglang.staging import Part, Stage
from hsprobe.probes.sglang.tape import Tape

if TYPE_CHECKING:
    from hsprobe.probes.sglang.device import Device
    from hsprobe.probes.sglang.recorder import Recorder

logger = logging.getLogger("hsprobe")

MARK = "hsprobe"
DESKS = 2
SIDE_BYTES = 1 << 19
"""Larger reads go over a stream of their own: the server's next kernels need not wait for the bus. The calls
for that take longer than a smaller read."""
CLOSED = "ran from a CUDA graph, which hsprobe cannot see into in this SGLang (--disable-cuda-graph)"
_BOOK = "_hsprobe_book"


class Desk:
    """A buffer that is being read, until its tickets are noted."""

    def __init__(self) -> None:
        self.memory: torch.Tensor | None = None
        self.address = 0
        self.tickets: Tickets = ()


class Arena:
    """The buffer that all graphs of one backend copy into; they never run at the same time.

    Large reads of it go over the bus while the next pass runs, from one of two further buffers.
    """

    def __init__(self) -> None:
        self.memory: torch.Tensor | None = None
        self._desks: list[Desk] = []

    def desk(self, size: int, device: Device, stream: int, grow: Callable[[int], bool]) -> Desk | None:
        """The buffer that was read longest ago, free for the stream; None where there is no room for it."""
        desk = self._desks.pop(0) if len(self._desks) >= DESKS else Desk()
        self._desks.append(desk)
        for ticket in desk.tickets:
            device.wait_for(ticket, stream)
        if desk.memory is None or desk.memory.numel() < size:
            wanted = 1 << (size - 1).bit_length()
            if not grow(wanted):
                return None
            desk.memory = torch.empty(wanted, dtype=torch.uint8, device="cuda")
            desk.address = desk.memory.data_ptr()
        return desk

    def reserve(self, size: int, device: torch.device, grow: Callable[[int], bool]) -> torch.Tensor | None:
        """`size` bytes; older buffers live on in the graphs that were captured with them."""
        if self.memory is None or self.memory.numel() < size:
            if not grow(size):
                return None
            self.memory = torch.empty(size, dtype=torch.uint8, device=device)
        return self.memory


class Book:
    """The tapes of a backend's graphs, and the buffer that they share."""

    def __init__(self) -> None:
        self.tapes: dict[Any, Tape] = {}
        self.arena = Arena()


class Graphs:
    """All graphs of this process that hold the probes' copies.

    Args:
        recorder: what the probes hand their tensors to.
        max_bytes: of device memory for all buffers together.
        capturing: whether what is called now goes into a graph.
    """

    def __init__(
        self, recorder: Recorder, max_bytes: int, capturing: Callable[[], bool] | None = None
    ) -> None:
        self._capturing = capturing or torch.cuda.is_current_stream_capturing
        self._recorder = recorder
        self._left = max_bytes
        self._numbers = itertools.count()
        self._side: Any = None
        self._copied = 0

    def capture_one(
        self, original: Any, backend: Any, shape_key: Any, forward: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Around the backend's ``capture_one``."""
        tape = Tape(next(self._numbers), probed(shape_key))

        def plain() -> Any:
            if self._capturing():
                return forward()
            tape.begin(recording=False)
            with self._recorder.taping(tape):
                return forward()

        with self._recorder.suspended():
            result = original(backend, shape_key, plain, *args, **kwargs)
            self.book(backend).tapes[shape_key] = tape
            self._recorder.guard(
                "graphs", self._capture, tape, original, backend, shape_key, forward, args, kwargs
            )
        return result

    def _capture(
        self, tape: Tape, original: Any, backend: Any, shape_key: Any, forward: Any, args: Any, kwargs: Any
    ) -> None:
        """The same graph again, with copies."""
        if not tape.wanted or not self._left:
            return
        arena = self.book(backend).arena
        tape.lay_out(lambda size, device: arena.reserve(size, device, self._grow))
        if tape.left_out:
            self._recorder.remember_gap(
                f"graphs of {shape_key.size} rows: no room for {', '.join(sorted(tape.left_out))} within "
                "the device memory allowed (HSPROBE_DEVICE_MEMORY)"
            )
        if not tape.groups:
            return

        def taped() -> Any:
            if not self._capturing():
                return forward()
            tape.begin(recording=True)
            with self._recorder.taping(tape):
                return forward()

        prepare(tape.device)
        try:
            original(backend, tape.key, taped, *args, **kwargs)
            if not tape.complete:
                self._recorder.remember_gap(f"graphs of {shape_key.size} rows: a copy is missing in them")
                tape.groups = []
        except Exception:
            tape.groups = []
            raise

    @staticmethod
    def book(backend: Any) -> Book:
        """What is kept of a backend, with it."""
        found = getattr(backend, _BOOK, None)
        if found is None:
            found = Book()
            setattr(backend, _BOOK, found)
        return found

    def _grow(self, size: int) -> bool:
        if size > self._left:
            return False
        self._left -= size
        return True

    def replay(self, original: Any, backend: Any, shape_key: Any, *args: Any, **kwargs: Any) -> Any:
        """Around the backend's ``replay``."""
        recorder = self._recorder
        current = recorder.under_way
        if current is None:
            return original(backend, shape_key, *args, **kwargs)
        recorder.replays(current, shape_key.size)
        book = self.book(backend)
        tape = book.tapes.get(shape_key)
        if tape is not None and tape.groups:
            result = original(backend, tape.key, *args, **kwargs)
            recorder.guard("graphs", self._read, tape, book.arena, current)
            return result
        if tape is None or tape.wanted:
            recorder.gap("graphs", "a CUDA graph without the probes' copies ran")
        elif not current.emitted:
            # It holds nothing that was asked for.
            recorder.under_way = None
        return original(backend, shape_key, *args, **kwargs)

    def closed_capture(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Around a runner that captures its graphs by itself, at times in the middle of a pass."""
        with self._recorder.suspended():
            return original(*args, **kwargs)

    def closed_replay(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Around a runner whose graphs hold no copies: what it runs is not recorded, and a gap says so."""
        current = self._recorder.under_way
        if current is not None:
            self._recorder.replays(current, current.form.n_rows)
            self._recorder.gap("graphs", CLOSED)
        return original(*args, **kwargs)

    def _read(self, tape: Tape, arena: Arena, current: Pass) -> None:
        stage = self._recorder.stage
        if stage is None:
            return
        if not tape.labelled and not current.emitted:
            self._recorder.emit(current)
        parts = tape.parts if tape.form is current.form else _in_use(tape, current.form)
        device = stage.device if tape.on_gpu else None
        if device is None:
            self._copy(stage, tape, current, parts, None)
            return
        stream, part = device.stream(), parts[0]
        if part.size > SIDE_BYTES and len(parts) == 1 and len(part.spans) == 1:
            desk = arena.desk(part.size, device, stream, self._grow)
            if desk is not None and desk.memory is not None:
                beside = self._aside(part, desk, device, stream)
                self._copy(stage, tape, current, [beside], self._side.cuda_stream)
                desk.tickets = stage.flush()
                return
        self._copy(stage, tape, current, parts, stream)

    def _aside(self, part: Part, desk: Desk, device: Device, stream: int) -> Part:
        """Copy within the device, in microseconds; the way to the host is then beside the next pass."""
        if self._side is None:
            self._side, self._copied = torch.cuda.Stream(), device.event()
        device.move(desk.address, part.spans[0][1], part.size, stream)
        device.record(self._copied, stream)
        device.wait(self._side.cuda_stream, self._copied)
        assert desk.memory is not None
        return Part(((desk.memory, desk.address, part.size),), part.size)

    def _copy(self, stage: Stage, tape: Tape, current: Pass, parts: list[Part], stream: int | None) -> None:
        """Copy the rows in use and queue the record."""
        pieces = stage.read(parts, stream)
        if pieces is None:
            self._recorder.no_room(current, sum(part.size for part in parts))
        else:
            self._recorder.emit_block(tape, current, pieces)


def _in_use(tape: Tape, form: Form) -> list[Part]:
    """What to read of each group; worked out once for the passes of one batch.

    The group with most rows has one for each row of the pass, another one for each request.
    """
    parts = []
    for number, group in enumerate(tape.groups):
        rows = None if number == 0 else "last"
        cuts = [
            group.flat[first * group.row_size : last * group.row_size]
            for first, last in form.runs_of(rows)
            if first < last
        ]
        parts.append(Part.of(cuts))
    tape.form, tape.parts = form, parts
    return parts


def probed(shape_key: Any) -> Any:
    """The key under which the graph with copies is kept."""
    label = MARK if shape_key.variant_label is None else f"{MARK} {shape_key.variant_label}"
    return replace(shape_key, variant_label=label)
