"""The recorder, ring and writer that run in a server, with a batch played by hand and a graph in Python.

A backend here keeps what it was given to capture and runs it again at each replay, as a CUDA graph runs its
kernels again. Letters: R rows of a graph, n rows in use, W width.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch

from hsprobe.probes.sglang.graphs import Graphs
from hsprobe.probes.sglang.opening import Opened, open_stage
from hsprobe.probes.sglang.recorder import Recorder
from hsprobe.probes.sglang.settings import SITES, Settings
from hsprobe.probes.sglang.shared import WRITER
from hsprobe.trace.blocks import Expander
from hsprobe.trace.spool import Record, SpoolReader
from hsprobe.trace.switch import Switch

W = 24
PLACE = {"tp": 0, "pp": 0, "dp": 0, "attn_tp": 0, "attn_tp_size": 1, "rank": 0}


@dataclass(frozen=True)
class Key:
    """SGLang's ``ShapeKey``."""

    size: int
    variant_label: str | None = None


class Backend:
    """SGLang's backend of CUDA graphs, with its two methods."""

    capturing = False

    def __init__(self) -> None:
        self.graphs: dict[Key, object] = {}

    def capture_one(self, key: Key, forward, *, fails: bool = False) -> None:
        forward()
        type(self).capturing = True
        try:
            if fails and key.variant_label is not None:
                raise MemoryError("no room for a second graph")
            forward()
        finally:
            type(self).capturing = False
        self.graphs[key] = forward

    def replay(self, key: Key) -> str:
        if key.variant_label is None:
            return "graph"
        type(self).capturing = True
        try:
            self.graphs[key]()
        finally:
            type(self).capturing = False
        return "graph with copies"


class Rig:
    """A recorder with one backend; its graphs read `hidden_RW`, `ids_R`, `positions_R`."""

    def __init__(self, folder: Path, rows: int, per_request: int = 1, **settings) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.recorder = Recorder(Settings(folder, frozenset(SITES), None, **settings), self._opened)
        self.graphs = Graphs(self.recorder, settings.get("device_memory", 1 << 20), lambda: Backend.capturing)
        self.recorder.graphs = self.graphs
        self.backend = Backend()
        self.rows, self.per_request = rows, per_request
        self.ended = True
        self.hidden_RW = torch.zeros(rows, W, dtype=torch.bfloat16)
        self.ids_R = torch.zeros(rows, dtype=torch.int32)
        self.positions_R = torch.zeros(rows, dtype=torch.int64)
        self.spool = folder / "rank-0.spool"

    def _opened(self, settings, runners) -> Opened:
        return Opened(PLACE, open_stage(settings, self.spool), Switch(self.folder))

    @property
    def shared(self):
        """The memory that the recorder and its writer share."""
        return self.recorder.stage.spooler.shared

    def writer(self) -> int:
        """The writer's process id, once it runs."""
        deadline = time.monotonic() + 20
        while not self.shared.words[WRITER]:
            assert time.monotonic() < deadline, "the writer did not start"
            time.sleep(0.01)
        return self.shared.words[WRITER]

    def model(self) -> None:
        """The forward that is captured: two sites, one of them twice as wide and in two parts, and labels."""
        recorder = self.recorder
        graph = recorder.current(draft=False)
        if graph is None:
            return
        recorder.take(graph, "layer/003", self.hidden_RW, site="layer", depth=3)
        recorder.take(graph, "aux", [self.hidden_RW, -self.hidden_RW], site="aux", depths=[3, 4], chunks=2)
        last_BW = self.hidden_RW[self.per_request - 1 :: self.per_request]
        recorder.take(graph, "stored", last_BW, site="stored", last=True)
        recorder.labels(self.ids_R, self.positions_R)

    def capture(self, **more) -> None:
        key = Key(self.rows // self.per_request)
        self.graphs.capture_one(Backend.capture_one, self.backend, key, self.model, **more)

    def arm(self, asked: str = "") -> None:
        Switch(self.folder).turn_on(asked)

    def disarm(self) -> None:
        Switch(self.folder).turn_off()

    def step(self, rids: list[str], rows: int, mode: str, forward: Callable[[], None]) -> None:
        """One step of the scheduler, of a batch of these requests."""
        one = {"origin_input_ids": [1, 2], "output_ids": [3], "finished": lambda: self.ended}
        requests = [SimpleNamespace(rid=rid, **one) for rid in rids]
        batch = SimpleNamespace(
            forward_mode=SimpleNamespace(name=mode),
            rids=rids,
            input_ids=self.ids_R[:rows].clone(),
            positions=self.positions_R[:rows].clone(),
            extend_seq_lens_cpu=[rows // len(rids)] * len(rids),
            capture_hidden_mode=None,
        )
        runner = SimpleNamespace(is_draft_worker=False)
        self.recorder.runners = self.recorder.runners or [runner]
        self.recorder.step(requests)
        self.recorder.guard("pass", lambda: self.recorder.begin(runner, batch))
        forward()
        self.recorder.end()

    def eager(self, rids: list[str], rows: int, layers: int = 2, width: int = W) -> list[torch.Tensor]:
        """A pass without a graph, whose layers overwrite each other's output."""
        computed = []

        def forward() -> None:
            live = torch.empty(rows, width, dtype=torch.bfloat16)
            for depth in range(layers):
                live.copy_(torch.randn(rows, width))
                computed.append(live.clone())
                current = self.recorder.current(draft=False)
                if current is not None:
                    self.recorder.guard(
                        "layer", lambda depth=depth, current=current: self._take(current, depth, live)
                    )

        self.step(rids, rows, "EXTEND", forward)
        return computed

    def _take(self, current, depth: int, live: torch.Tensor) -> None:
        self.recorder.take(current, f"layer/{depth:03d}", live, site="layer", depth=depth)

    def run(self, rids: list[str], mode: str = "TARGET_VERIFY", seed: int = 0) -> tuple[str, torch.Tensor]:
        """A pass of the graph: its rows in the static buffers, junk behind them."""
        n = len(rids) * self.per_request
        generator = torch.Generator().manual_seed(seed)
        self.hidden_RW.copy_(torch.randn(self.rows, W, generator=generator))
        self.ids_R.copy_(torch.randint(0, 99, (self.rows,), generator=generator))
        self.positions_R.copy_(torch.arange(self.rows) + seed)
        expected = self.hidden_RW[:n].clone()
        ran = []
        key = Key(self.rows // self.per_request)
        self.step(rids, n, mode, lambda: ran.append(self.graphs.replay(Backend.replay, self.backend, key)))
        # The next pass overwrites the buffers that graphs share.
        self.hidden_RW.fill_(float("nan"))
        return ran[0], expected

    def records(self, seconds: float = 20.0) -> list[Record]:
        """Ordinary records, once the writer says that it has written all."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            stage = self.recorder.stage
            under_way = stage is None or not self.shared.at_rest or stage.ring.used
            found = list(SpoolReader(self.spool)) if self.spool.exists() and not under_way else []
            if found and found[-1].kind == "idle" and self.shared.at_rest:
                expander = Expander()
                return [one for record in found for one in expander.expand(record)]
            time.sleep(0.02)
        raise AssertionError("the writer did not come to rest")


def tensors(records: list[Record], name: str) -> list[Record]:
    return [r for r in records if r.kind == "tensor" and r.header["name"] == name]


def bits(record: Record) -> torch.Tensor:
    return torch.frombuffer(bytearray(record.payload), dtype=torch.bfloat16).reshape(record.header["shape"])
