"""Copies of live tensors, handed to a thread that writes them to the rank's spool.

A copy is enqueued on the stream that produced the tensor and the caller goes on: the next kernels
may overwrite the original, since SGLang's fused add+RMSNorm works in place.
"""

import logging
import os
import queue
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hsprobe.trace.spool import SpoolWriter

logger = logging.getLogger("hsprobe")

QUEUE_RECORDS = 4096
IDLE_SECONDS = 0.05


class Copy:
    """A tensor's bytes as they were when the copy was asked for.

    Args:
        tensor: any shape and dtype, on the CPU or a CUDA device.

    Attributes:
        dtype: torch's name of the dtype, e.g. ``"bfloat16"``.
        shape: the tensor's shape.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        tensor = tensor.detach()
        self.dtype = str(tensor.dtype).removeprefix("torch.")
        self.shape = list(tensor.shape)
        self._ready: Any = None
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._ready = torch.cuda.Event()
            self._ready.record()
        else:
            self._host = tensor.clone(memory_format=torch.contiguous_format)

    def bytes(self) -> memoryview:
        """The bytes in C order; waits for the device when the copy is still under way."""
        if self._ready is not None:
            self._ready.synchronize()
        return self._host.reshape(-1).view(torch.uint8).numpy().data


class Spooler:
    """Writes records in the order they are given, from a thread of its own.

    A full queue makes the server wait rather than lose a row. A failing disk, or ``max_bytes``,
    ends the recording, never the server.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self.stopped: str | None = None
        self._writer = SpoolWriter(path)
        self._max_bytes = max_bytes
        self._written = 0
        self._queue: queue.Queue[tuple[str, dict[str, Any], Sequence[Copy]]] = queue.Queue(QUEUE_RECORDS)
        threading.Thread(target=self._drain, name="hsprobe-spool", daemon=True).start()

    def put(self, kind: str, header: dict[str, Any], copies: Sequence[Copy] = ()) -> None:
        """Queue one record."""
        if self.stopped is None:
            self._queue.put((kind, header, copies))

    def _drain(self) -> None:
        idle = True
        while True:
            try:
                record = self._queue.get(timeout=None if idle else IDLE_SECONDS)
            except queue.Empty:
                self._write("idle", {}, ())
                idle = True
                continue
            self._write(*record)
            idle = False

    def _write(self, kind: str, header: dict[str, Any], copies: Sequence[Copy]) -> None:
        if self.stopped is not None:
            return
        try:
            payload = [copy.bytes() for copy in copies]
            self._written += sum(len(part) for part in payload)
            if self._written > self._max_bytes:
                self.stopped = f"the spool reached its limit of {self._max_bytes} bytes (HSPROBE_MAX_BYTES)"
                self._writer.append("gap", {"pass": header.get("pass"), "site": None, "reason": self.stopped})
            else:
                self._writer.append(kind, header, payload)
            self._writer.flush()
        except Exception as error:
            self.stopped = f"writing the spool failed: {error}"
        if self.stopped is not None:
            logger.error("hsprobe stopped recording in process %d: %s", os.getpid(), self.stopped)
