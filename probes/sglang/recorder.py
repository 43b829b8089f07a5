"""Holds the pass under way and takes what the sites hand over, without ever failing the server."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from hsprobe.probes.sglang.graphs import Graphs
from hsprobe.probes.sglang.guarding import Guarded
from hsprobe.probes.sglang.hooking import Temporary
from hsprobe.probes.sglang.keeping import Keeper
from hsprobe.probes.sglang.labels import Labeller, Pass
from hsprobe.probes.sglang.linking import rids_of
from hsprobe.probes.sglang.opening import Opened
from hsprobe.probes.sglang.placing import Extent, NotRecordable, Placed, place
from hsprobe.probes.sglang.pressure import Pressure
from hsprobe.probes.sglang.proof import DISARMED
from hsprobe.probes.sglang.requests import Requests
from hsprobe.probes.sglang.sampling import Runs, Sampling
from hsprobe.probes.sglang.settings import Settings
from hsprobe.probes.sglang.shared import RUNNING, Piece
from hsprobe.probes.sglang.staging import Stage
from hsprobe.probes.sglang.tape import Tape
from hsprobe.probes.sglang.telling import Teller
from hsprobe.trace.schema import SPREAD_COLUMNS
from hsprobe.trace.switch import Switch

STEP_BITS = 8
"""Of a pass's number among its model's: a step of the scheduler runs fewer than 256 of them."""


class Recorder(Guarded):
    """One a process. Records only while the switch in the spool folder is on.

    Args:
        opening: opens the spool, of a rank that was asked for, when the first step runs.

    Attributes:
        sampling: what the armed capture is to record.
        hooks: those that are there only while a capture is armed, or a graph is captured.
    """

    def __init__(self, settings: Settings, opening: Callable[[Settings, Sequence[Any]], Opened]) -> None:
        super().__init__()
        self.settings = settings
        self.sampling = settings.sampling
        self.runners: list[Any] = []
        self.hooks = Temporary()
        self.graphs = Graphs(self, settings.device_memory)
        self._opening = opening
        self._tape: Tape | None = None
        self._labeller = Labeller()
        self._batch: Any = None
        self._sliced = False
        self._padding = 0
        self._count = 0
        self._nth = {False: 0, True: 0}
        self._place: dict[str, int] = {}
        self._ran = 0
        self._steps = 0
        self._requests = Requests()
        self._in_batch: list[Any] = []
        self._keeper: Keeper | None = None
        self._teller = Teller()
        self._switch: Switch | None = None
        self._armed = 0
        self._holding = False
        self._recording = False
        self._left_out: str | None = None

    # The order of events

    def step(self, requests: Sequence[Any]) -> None:
        """The scheduler is about to run a batch of these requests (SGLang's ``Req``)."""
        # Ranks run the same steps, so that this number joins their passes.
        self._ran += 1
        if self._switch is None:
            if self._place or not self.runners:
                return
            self._open()
            if self._switch is None:
                return
        number = self._switch.number
        if number != self._armed:
            self._turn(number)
        if self._armed:
            self._step(requests)

    def _step(self, requests: Sequence[Any]) -> None:
        stage, keeper = self.stage, self._keeper
        assert stage is not None
        assert keeper is not None
        self._nth = {False: 0, True: 0}
        self._steps += 1
        keeper.steps += 1
        self._left_out = self._reason_to_leave_out(stage, requests)
        self._recording = self._left_out is None and stage.spooler.stopped is None
        if requests == self._in_batch:
            return
        # The scheduler changes its list in place.
        self._in_batch = list(requests)
        prompts = self._requests.prompts(requests, self.sampling)
        for header in prompts:
            stage.spooler.put("request", header)
        if prompts:
            stage.spooler.shared.words[RUNNING] = self._requests.running

    def _reason_to_leave_out(self, stage: Stage, requests: Sequence[Any]) -> str | None:
        every, pressure = self.sampling.every, stage.pressure
        if every == 1 and self.sampling.requests is None and pressure.stride == 1:
            return None
        if (self._steps - 1) % every:
            return f"only every {every}th step was to be recorded (HSPROBE_EVERY)"
        if self.sampling.requests is not None and not self.sampling.wants_any([r.rid for r in requests]):
            return f"only requests {self.sampling.requests} were to be recorded (HSPROBE_REQUESTS)"
        if not pressure.wants((self._steps - 1) // every, stage.ring.used / stage.ring.capacity):
            return "fewer steps were recorded until the writer had caught up (HSPROBE_ON_PRESSURE=sample)"
        return None

    def begin(self, runner: Any, batch: Any, with_ids: bool = True) -> None:
        """A model's forward is about to run; `with_ids`: on the batch's own token ids."""
        if self._tape is not None:
            self._in_graph(runner, batch)
            return
        stage = self.stage
        if not self._armed or stage is None:
            return
        is_draft = bool(runner.is_draft_worker)
        self._count += 1
        nth = self._nth[is_draft] = self._nth[is_draft] + 1
        if not self._recording:
            if self._left_out and rids_of(batch, self._in_batch):
                asked = "to be recorded" in self._left_out
                stage.ledger.add(self._left_out, self._count, asked=asked)
            return
        self._batch, self._sliced, self._padding = batch, False, 0
        nth += self._ran << STEP_BITS
        self.under_way = self._labeller.read(self._count, nth, runner, batch, self.sampling, self._in_batch)
        if self.under_way is not None:
            if not with_ids:
                self.under_way.ids = None
            if self.proof.open[is_draft] and not self._proves(self.under_way, batch):
                return
            if not self._holding:
                self._holding = stage.lock.acquire()

    def _proves(self, current: Pass, batch: Any) -> bool:
        """The self-test looks at this pass; whether its labels hold, without which nothing is recorded."""
        self.guard("proof", self.proof.begin, current, batch)
        if "proof" in self.disarmed:
            self.proof.give_up(self.disarmed["proof"])
        if "pass" in self.disarmed:
            self.under_way = None
        return self.under_way is not None

    def _in_graph(self, runner: Any, batch: Any) -> None:
        if self._tape is not None and runner.is_draft_worker and batch.forward_mode.name == "DECODE":
            self._tape.next_step("draft_decode")

    def end(self) -> None:
        """The model's forward has returned."""
        if self._tape is not None:
            return
        current, self.under_way, self._batch = self.under_way, None, None
        if current is not None:
            self.guard("pass", self._end, current)
        if self._holding and self.stage is not None:
            self._holding = False
            self.stage.lock.release()

    def _end(self, current: Pass) -> None:
        if self.stage is not None:
            if not current.emitted and not current.short:
                self.emit(current)
            self.stage.end_pass()
            if self.proof.active:
                self.guard("proof", lambda: self.tell(self.proof.end(current)))

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """While SGLang runs a model to capture it, no pass is under way."""
        current, self.under_way = self.under_way, None
        try:
            yield
        finally:
            self.under_way = current

    @contextmanager
    def taping(self, tape: Tape) -> Iterator[None]:
        """What the probes take goes into a graph."""
        self._tape = tape
        self.hooks.need("graph", True)
        try:
            yield
        finally:
            self._tape = None
            self.hooks.need("graph", False)

    # What the probes use

    def current(self, *, draft: bool) -> Pass | Tape | None:
        """The pass under way if it is the draft's (the target's), the graph being captured, or ``None``."""
        if self._tape is not None:
            return self._tape
        labelled = self.under_way
        return labelled if labelled is not None and labelled.form.is_draft == draft else None

    def labels(self, ids: torch.Tensor, positions: torch.Tensor) -> None:
        """The token ids and positions of the forward that is being captured into a graph."""
        if self._tape is not None:
            with self._tape.together():
                self._tape.labels(ids, positions)

    @property
    def in_graph(self) -> bool:
        """Whether a graph is being captured."""
        return self._tape is not None

    def together(self) -> AbstractContextManager[None]:
        """What is taken in this context is there at the same time: a graph copies it with one kernel."""
        return nullcontext() if self._tape is None else self._tape.together()

    def take(
        self,
        labelled: Pass | Tape,
        name: str,
        tensor: torch.Tensor | Sequence[torch.Tensor],
        *,
        site: str,
        depth: int | str | None = None,
        depths: Sequence[int] | None = None,
        chunks: int | None = None,
        scattered: bool | None = None,
        last: bool = False,
        share: bool = False,
    ) -> None:
        """Copy a tensor of the pass and queue it.

        Args:
            labelled: the pass that computed it.
            name: the tensor's name in the trace.
            tensor: ``[n, W]``, rows of the pass. Several are laid side by side.
            scattered, last: what is known of its rows, see `placing.place`.
            share: under tensor parallelism, it holds this rank's share of the columns.

        Raises:
            NotRecordable: the tensor's rows are not rows of the pass.
        """
        header = {
            "site": site,
            "depth": depth,
            "depths": None if depths is None else list(depths),
            "chunks": chunks,
        }
        if share and self._place["tp_size"] > 1:
            header["spread"] = SPREAD_COLUMNS
        parts = [tensor] if isinstance(tensor, torch.Tensor) else list(tensor)
        if any(part.ndim != 2 for part in parts):
            raise NotRecordable(f"a tensor of shape {list(parts[0].shape)} has no rows of its own")
        if isinstance(labelled, Tape):
            if scattered:
                raise NotRecordable("in a CUDA graph, and spread over ranks")
            labelled.put(name, parts, header, last=last)
            return
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        placed = self._placed(labelled, whole.shape[0], scattered, last)
        if self.proof.active:
            self.proof.saw(site, depth, whole, depths)
        if not (placed.is_slice and placed.count == 0):
            self._take(labelled, name, whole, header, placed)

    def _take(
        self, labelled: Pass, name: str, tensor: torch.Tensor, header: dict[str, Any], placed: Placed
    ) -> None:
        stage = self.stage
        if stage is None or labelled.short:
            return
        if not labelled.emitted:
            self.emit(labelled)
        runs = self._runs(labelled, placed)
        piece = stage.copy(tensor, runs)
        if piece is None:
            self.no_room(labelled, tensor.numel() * tensor.element_size())
            return
        n_rows = sum(last - first for first, last in runs)
        stage.add(
            "tensor",
            {
                "pass": labelled.number,
                "name": name,
                **header,
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": [n_rows, tensor.shape[1]],
                "rows": placed.rows if labelled.form.runs is None or placed.rows == "last" else None,
                "slice": placed.is_slice,
            },
            (piece,),
        )

    def _runs(self, labelled: Pass, placed: Placed) -> Runs:
        if labelled.form.runs is None:
            return [(0, placed.count)]
        if placed.is_slice:
            raise NotRecordable("chosen rows of a tensor that is spread over ranks")
        return labelled.form.runs_of(placed.rows)

    def _placed(self, labelled: Pass, n: int, scattered: bool | None, last: bool) -> Placed:
        if labelled.graph and n == labelled.padded_rows:
            # The tail of a graph's rows is whatever an earlier pass left there.
            return Placed(None, labelled.form.n_rows)
        extent = Extent(
            n_rows=labelled.form.n_rows,
            n_padded=self._rows_now(labelled),
            n_requests=len(labelled.form.rids),
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
        form = labelled.form
        n_padded = max(form.n_rows, int(self._batch.input_ids.shape[0]))
        if n_padded - form.n_rows > self._padding and self.stage is not None and form.runs is None:
            self._padding = n_padded - form.n_rows
            if not labelled.emitted:
                self.emit(labelled)
            self.stage.add("padding", {"pass": labelled.number, "rows": self._padding})
        return n_padded

    def replays(self, current: Pass, padded_rows: int) -> None:
        """The pass under way runs from a CUDA graph of so many rows."""
        current.padded_rows = max(padded_rows, current.padded_rows)
        if not current.graph and current.emitted and self.stage is not None:
            # Part of it ran before, and was recorded, without a graph.
            self.stage.add("graph", {"pass": current.number})
        current.graph = True
        if self.proof.open[current.form.is_draft]:
            self.proof.graph(draft=current.form.is_draft)

    def emit(self, current: Pass) -> None:
        """Queue the record of a pass, its token ids and positions with it."""
        current.emitted = True
        if self.stage is None or current.ids is None:
            return
        pieces = []
        for labels in (current.ids, current.positions):
            piece = self.stage.copy(labels.to(torch.int64), current.form.runs_of(None))
            if piece is None:
                self.no_room(current, labels.numel() * 8)
                return
            pieces.append(piece)
        self.stage.add("pass", current.header(), pieces)

    def emit_block(self, tape: Tape, current: Pass, pieces: Sequence[Piece]) -> None:
        """Queue what was read of a graph."""
        assert self.stage is not None
        self._teller.tell(self.stage, tape, current, pieces, check=self.sampling.check)
        if tape.labelled:
            current.emitted = True
            self._count += tape.steps - 1
            self._nth[current.form.is_draft] += tape.steps - 1

    # The spool

    def _turn(self, number: int) -> None:
        """The switch has been turned: off, or on for another capture."""
        stage, keeper, switch = self.stage, self._keeper, self._switch
        assert stage is not None
        assert keeper is not None
        assert switch is not None
        if self._armed:
            self._armed, self._recording = 0, False
            keeper.watch(False)
        asked, wrong = None, None
        if number:
            try:
                asked = switch.asked()
                if asked is None:
                    return
                sampling = self.settings.sampling.changed(asked)
            except ValueError as error:
                sampling, wrong = self.settings.sampling, error
            self._arm(stage, keeper, number, sampling)
            if wrong:
                self.gap(None, f"what the capture asked for was not understood: {wrong}")
        self.hooks.need("capture", bool(number))

    def _arm(self, stage: Stage, keeper: Keeper, number: int, sampling: Sampling) -> None:
        self._armed, self.sampling = number, sampling
        self._in_batch = []
        self._steps = 0
        self._teller.forget()
        self._labeller.forget()
        self._requests.forget()
        stage.pressure = Pressure(self.sampling.on_pressure)
        keeper.watch(True)
        self.tell(self.proof.news(everything=True))
        for site, reason in self.disarmed.items():
            self.gap(site, reason)
            if not self.proof.stopped(site, reason):
                self.tell([{"site": site, "state": DISARMED, "why": reason}])
        for reason in self.early_gaps:
            self.gap("graphs", reason)

    def _open(self) -> None:
        opened = self._opening(self.settings, self.runners)
        self._place, self.stage, self._switch = opened.place, opened.stage, opened.switch
        if self.stage is not None:
            self._keeper = Keeper(self.stage, self._requests)
