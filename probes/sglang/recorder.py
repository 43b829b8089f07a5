"""Holds the pass under way and takes what the sites hand over, without ever failing the server."""

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from hsprobe.probes.sglang.labels import Pass, read_pass
from hsprobe.probes.sglang.placing import Extent, NotRecordable, Placed, place
from hsprobe.probes.sglang.settings import Settings
from hsprobe.probes.sglang.spooling import Copy, Spooler
from hsprobe.trace.place import ARMED, directory_for_port, make_private, remove_leftovers

logger = logging.getLogger("hsprobe")


class Recorder:
    """One a process. Records only while a file named ``armed`` lies in the spool folder.

    A process whose rank was not asked for opens no spool.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.runners: list[Any] = []
        self.disarmed: dict[str, str] = {}
        self._current: Pass | None = None
        self._batch: Any = None
        self._sliced = False
        self._padding = 0
        self._count = 0
        self._nth = {False: 0, True: 0}
        self._place: dict[str, int] = {}
        self._known_requests: set[str] = set()
        self._spooler: Spooler | None = None
        self._armed_file: Path | None = None
        self._armed = False

    def guard(self, site: str, act: Callable[[], None]) -> None:
        """Run a probe's code; a failure disarms the site, is logged once and recorded as a gap."""
        if site in self.disarmed:
            return
        try:
            act()
        except NotRecordable as error:
            self.gap(site, str(error))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            self.disarmed[site] = reason
            logger.exception("hsprobe disarmed its probe at %s; the server goes on", site)
            self.gap(site, reason)

    def gap(self, site: str | None, reason: str, depth: int | None = None) -> None:
        """Record that something was not recorded, and why."""
        if self._spooler is not None:
            number = self._current.number if self._current else None
            self._spooler.put("gap", {"pass": number, "site": site, "depth": depth, "reason": reason})

    def begin(self, runner: Any, batch: Any) -> None:
        """A model's forward is about to run."""
        is_draft = bool(runner.is_draft_worker)
        self._count += 1
        self._nth[is_draft] += 1
        self._current, self._batch, self._sliced, self._padding = None, batch, False, 0
        if not self._place:
            self._open(runner)
        was_armed, self._armed = self._armed, self._armed_file is not None and self._armed_file.exists()
        if not self._armed:
            return
        if not was_armed:
            for site, reason in self.disarmed.items():
                self.gap(site, reason)
        labelled = read_pass(self._count, self._nth[is_draft], runner, batch)
        if labelled is not None and self._spooler is not None:
            self._current = labelled
            self._spooler.put("pass", labelled.header(), (labelled.ids, labelled.positions))

    def end(self) -> None:
        """The model's forward has returned."""
        self._current = self._batch = None

    def current(self, *, draft: bool) -> Pass | None:
        """The pass under way if it is the draft's (the target's), else ``None``."""
        labelled = self._current
        return labelled if labelled is not None and labelled.is_draft == draft else None

    def take(
        self,
        labelled: Pass,
        name: str,
        tensor: torch.Tensor,
        *,
        site: str,
        depth: int | str | None = None,
        depths: Sequence[int] | None = None,
        chunks: int | None = None,
        scattered: bool | None = None,
        last: bool = False,
    ) -> None:
        """Copy a tensor of the pass and queue it.

        Args:
            labelled: the pass that computed it.
            name: the tensor's name in the trace.
            tensor: ``[n, W]``, rows of the pass.
            scattered, last: what is known of its rows, see `placing.place`.

        Raises:
            NotRecordable: the tensor's rows are not rows of the pass.
        """
        if self._spooler is None:
            return
        if tensor.ndim != 2:
            raise NotRecordable(f"a tensor of shape {list(tensor.shape)} has no rows of its own")
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            raise NotRecordable("inside a CUDA graph; start the server with --disable-cuda-graph")
        placed = self._placed(labelled, tensor.shape[0], scattered, last)
        if placed.is_slice and placed.count == 0:
            return
        copy = Copy(tensor[: placed.count])
        header = {
            "pass": labelled.number,
            "name": name,
            "site": site,
            "depth": depth,
            "depths": None if depths is None else list(depths),
            "chunks": chunks,
            "dtype": copy.dtype,
            "shape": copy.shape,
            "rows": placed.rows,
            "slice": placed.is_slice,
        }
        self._spooler.put("tensor", header, (copy,))

    def _placed(self, labelled: Pass, n: int, scattered: bool | None, last: bool) -> Placed:
        extent = Extent(
            n_rows=labelled.n_rows,
            n_padded=self._rows_now(labelled),
            n_requests=len(labelled.rids),
            part=self._place["attn_tp"],
            n_parts=self._place["attn_tp_size"],
        )
        placed = place(n, extent, scattered=scattered, last=last)
        self._sliced |= placed.is_slice
        if self._sliced and scattered is None and extent.n_padded == 1:
            raise NotRecordable("a row of a pass of one row that is spread over ranks: whose cannot be told")
        return placed

    def _rows_now(self, labelled: Pass) -> int:
        """Rows of the batch under way. Those beyond the labelled ones are padding, which is noted once."""
        n_padded = max(labelled.n_rows, int(self._batch.input_ids.shape[0]))
        if n_padded - labelled.n_rows > self._padding and self._spooler is not None:
            self._padding = n_padded - labelled.n_rows
            self._spooler.put("padding", {"pass": labelled.number, "rows": self._padding})
        return n_padded

    def requests(self, requests: Sequence[Any]) -> None:
        """Note the prompt of each request (SGLang's ``Req``) not seen before."""
        if self._spooler is None or self._armed_file is None or not self._armed_file.exists():
            return
        for request in requests:
            if request.rid not in self._known_requests:
                self._known_requests.add(request.rid)
                prompt = [int(token) for token in request.origin_input_ids]
                self._spooler.put("request", {"rid": request.rid, "origin_ids": prompt})

    def _open(self, runner: Any) -> None:
        from hsprobe.probes.sglang.provenance import coordinates, describe, layers_of

        self._place = coordinates()
        if self.settings.ranks is not None and self._place["rank"] not in self.settings.ranks:
            return
        directory = self.settings.directory
        if directory is None:
            directory = directory_for_port(int(runner.server_args.port))
            make_private(directory.parent)
            remove_leftovers(directory)
        make_private(directory)
        name = "-".join(f"{axis}{self._place[axis]}" for axis in ("pp", "dp", "tp"))
        self._armed_file = directory / ARMED
        self._spooler = Spooler(directory / f"{name}-{os.getpid()}.spool", self.settings.max_bytes)
        asked = None if self.settings.ranks is None else sorted(self.settings.ranks)
        hello = {
            **self._place,
            **layers_of(self.runners),
            "ranks": asked,
            "pid": os.getpid(),
            "provenance": describe(self.runners, self.settings),
        }
        self._spooler.put("hello", hello)
