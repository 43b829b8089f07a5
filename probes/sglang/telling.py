"""Records of what was read of graphs: what passes have in common is told once, each pass in a few numbers."""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from typing import Any

import torch

from hsprobe.probes.sglang.labels import Form, Pass
from hsprobe.probes.sglang.shared import Piece
from hsprobe.probes.sglang.staging import Stage
from hsprobe.probes.sglang.tape import Tape


class Teller:
    """Knows what the writer has been told of each graph."""

    def __init__(self) -> None:
        self._told: dict[int, tuple[Form, bool]] = {}

    def forget(self) -> None:
        """Another capture begins, which can be read without those before it."""
        self._told.clear()

    def tell(self, stage: Stage, tape: Tape, current: Pass, pieces: Sequence[Piece], *, check: bool) -> None:
        """Queue a pass.

        Args:
            pieces: where the rows in use of each group of columns lie.
            check: add a checksum of a second reading; waits for the device.
        """
        form, graph = self._told.get(tape.number, (None, False))
        if form is None:
            stage.add("layout", tape.described())
        if form is not current.form or graph != current.graph:
            self._told[tape.number] = (current.form, current.graph)
            more = {"form": tape.number, "layout": tape.number, "graph": current.graph}
            phase = {"phase": tape.phase} if tape.phase else {}
            stage.add("form", {**current.form.header(), **more, **phase})
        header: tuple[Any, ...] = (tape.number, current.number, current.nth, time.time())
        if check:
            pairs = zip(tape.groups, pieces, strict=True)
            header = (*header, [zlib.crc32(_bytes(group.flat[: piece[1]])) for group, piece in pairs])
        stage.add("block", header, pieces)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.cpu().numpy().data
