"""Capture inside CUDA graphs: each graph a second time with the probes' copies in it, read after each replay.

SGLang captures each batch shape through its backend's ``capture_one`` and runs it through ``replay``
(``model_executor/runner_backend``). hsprobe lets it capture the graph as it is, and then once more, with
copies, under a key of its own. A pass that is to be recorded replays the second, any other pass the first,
so a server whose probes are not armed runs exactly what it would run without them.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from hsprobe.probes.sglang.labels import Pass
from hsprobe.probes.sglang.sampling import Runs
from hsprobe.probes.sglang.spooling import Piece
from hsprobe.probes.sglang.tape import Tape

if TYPE_CHECKING:
    from hsprobe.probes.sglang.recorder import Recorder

logger = logging.getLogger("hsprobe")

Part = tuple[torch.Tensor, "Runs | None", int]

MARK = "hsprobe"
DESKS = 2
SIDE_BYTES = 1 << 19
"""Larger reads go over a stream of their own: the server's next kernels need not wait for the bus."""


class Desk:
    """A buffer that is being read, until its event has come to pass."""

    def __init__(self) -> None:
        self.memory: torch.Tensor | None = None
        self.read: Any = torch.cuda.Event()


class Arena:
    """The buffer that all graphs of one backend copy into; they never run at the same time.

    Large reads of it go over the bus while the next pass runs, from one of two further buffers.
    """

    def __init__(self) -> None:
        self.memory: torch.Tensor | None = None
        self._desks: list[Desk] = []

    def desk(self, size: int, device: torch.device, grow: Callable[[int], bool]) -> Desk | None:
        """The buffer that was read longest ago, None where there is no room for it."""
        desk = self._desks.pop(0) if len(self._desks) >= DESKS else Desk()
        self._desks.append(desk)
        if desk.memory is None or desk.memory.numel() < size:
            wanted = 1 << (size - 1).bit_length()
            if not grow(wanted):
                return None
            # What is given back may still be read from.
            torch.cuda.current_stream().wait_event(desk.read)
            desk.memory = torch.empty(wanted, dtype=torch.uint8, device=device)
        return desk

    def reserve(self, size: int, device: torch.device, grow: Callable[[int], bool]) -> torch.Tensor | None:
        """`size` bytes; older buffers live on in the graphs that were captured with them."""
        if self.memory is None or self.memory.numel() < size:
            if not grow(size):
                return None
            self.memory = torch.empty(size, dtype=torch.uint8, device=device)
        return self.memory


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
        self._tapes: WeakKeyDictionary[Any, dict[Any, Tape]] = WeakKeyDictionary()
        self._arenas: WeakKeyDictionary[Any, Arena] = WeakKeyDictionary()
        self._numbers = itertools.count()
        self._side: Any = None

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
            self._tapes.setdefault(backend, {})[shape_key] = tape
            self._recorder.guard(
                "graphs", lambda: self._capture(tape, original, backend, shape_key, forward, args, kwargs)
            )
        return result

    def _capture(
        self, tape: Tape, original: Any, backend: Any, shape_key: Any, forward: Any, args: Any, kwargs: Any
    ) -> None:
        """The same graph again, with copies."""
        if not tape.wanted or not self._left:
            return
        arena = self._arenas.setdefault(backend, Arena())
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

        try:
            original(backend, tape.key, taped, *args, **kwargs)
        except Exception:
            tape.groups = []
            raise

    def _grow(self, size: int) -> bool:
        if size > self._left:
            return False
        self._left -= size
        return True

    def replay(self, original: Any, backend: Any, shape_key: Any, *args: Any, **kwargs: Any) -> Any:
        """Around the backend's ``replay``."""
        current = self._recorder.under_way
        if current is None:
            return original(backend, shape_key, *args, **kwargs)
        self._recorder.replays(current, int(shape_key.size))
        tape = self._tapes.get(backend, {}).get(shape_key)
        if tape is None or not tape.groups:
            if tape is None or tape.wanted:
                self._recorder.gap("graphs", "a CUDA graph without the probes' copies ran")
            return original(backend, shape_key, *args, **kwargs)
        arena = self._arenas[backend]
        result = original(backend, tape.key, *args, **kwargs)
        self._recorder.guard("graphs", lambda: self._read(tape, arena, current))
        return result

    def _read(self, tape: Tape, arena: Arena, current: Pass) -> None:
        stage = self._recorder.stage
        if stage is None:
            return
        if not tape.labelled and not current.emitted:
            self._recorder.emit(current)
        parts = _in_use(tape, current)
        size = sum(size for _, _, size in parts)
        if tape.on_gpu and size > SIDE_BYTES and len(parts) == 1 and parts[0][1] is None:
            desk = arena.desk(size, tape.device, self._grow)
            if desk is not None and desk.memory is not None:
                self._aside(tape, current, parts[0][0], desk)
                return
        self._copy(tape, current, parts)

    def _aside(self, tape: Tape, current: Pass, source: torch.Tensor, desk: Desk) -> None:
        """Copy within the device, in microseconds, and from there to the host while the next pass runs."""
        stage, size = self._recorder.stage, source.numel()
        assert stage is not None
        assert desk.memory is not None
        stage.flush()
        if self._side is None:
            self._side = torch.cuda.Stream()
        main = torch.cuda.current_stream()
        main.wait_event(desk.read)
        part = desk.memory[:size]
        part.copy_(source, non_blocking=True)
        self._side.wait_stream(main)
        with torch.cuda.stream(self._side):
            self._copy(tape, current, [(part, None, size)])
            stage.flush()
            desk.read.record()

    def _copy(self, tape: Tape, current: Pass, parts: Sequence[Part]) -> None:
        """Copy the rows in use and queue the record."""
        recorder, stage = self._recorder, self._recorder.stage
        assert stage is not None
        pieces: list[Piece] = []
        for source, runs, size in parts:
            piece = stage.bits(source, size) if runs is None else stage.copy(source, runs)
            if piece is None:
                recorder.no_room(current, size)
                return
            pieces.append(piece)
        recorder.emit_block(tape, current, pieces)


def _in_use(tape: Tape, current: Pass) -> list[Part]:
    """What to read of each group: bytes, the runs of rows in them (None for all), and how many bytes it is.

    The group with most rows has one for each row of the pass, another one for each request.
    """
    parts: list[Part] = []
    for number, group in enumerate(tape.groups):
        if current.runs is None:
            rows = current.n_rows if number == 0 else len(current.rids)
            parts.append((group.cut(rows), None, rows * group.row_size))
        else:
            runs = current.runs_of(None if number == 0 else "last")
            size = group.row_size * sum(last - first for first, last in runs)
            parts.append((group.flat.view(group.rows, group.row_size), runs, size))
    return parts


def probed(shape_key: Any) -> Any:
    """The key under which the graph with copies is kept."""
    label = MARK if shape_key.variant_label is None else f"{MARK} {shape_key.variant_label}"
    return replace(shape_key, variant_label=label)
