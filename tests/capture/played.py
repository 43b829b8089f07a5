"""A server process played by hand: it writes a spool as the probes of a real one would."""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hsprobe.capture.assemble import AssembleSummary, RequestTokens, assemble
from hsprobe.trace.reader import Rank, Trace
from hsprobe.trace.spool import SpoolWriter

WIDTH = 4


class Server:
    """Plays one process of a server. Row r of the tensor of a pass holds [id, r, token, position].

    With `by_model`, ids count the passes of each model, as a real server does; without, all passes.
    """

    def __init__(self, path: Path, rank: int = 0, *, by_model: bool = False, **hello: Any) -> None:
        self.path = path
        self.spool = SpoolWriter(path)
        self.count = itertools.count()
        self.nth = Counter[str]()
        self.by_model = by_model
        self.hello(rank=rank, **hello)

    def hello(self, rank: int, **more: Any) -> None:
        """Begin (anew)."""
        self.spool.append("hello", {"rank": rank, "tp": rank, "pp": 0, "dp": 0, "attn_tp": rank, **more})

    def skip(self, count: int) -> None:
        """Run forwards, of target and draft in turn, without recording."""
        for number in range(count):
            next(self.count)
            self.nth["draft" if number % 2 else "target"] += 1

    def request(self, rid: str, prompt: Sequence[int]) -> None:
        self.spool.append("request", {"rid": rid, "origin_ids": list(prompt)})

    def run(
        self,
        phase: str,
        rows: Mapping[str, tuple[int | Sequence[int], Sequence[int]]],
        *,
        model: str = "target",
        padding: int = 0,
        tensor: str | None = "layer/002",
        **more: Any,
    ) -> int:
        """A pass; `rows` gives each request's first position (or all its positions) and token ids."""
        number = next(self.count)
        nth = self.nth[model] if self.by_model else number
        self.nth[model] += 1
        tokens: list[int] = []
        positions: list[int] = []
        for where, ids in rows.values():
            tokens += ids
            positions += range(where, where + len(ids)) if isinstance(where, int) else where
        tokens += [999] * padding
        positions += [0] * padding
        header = {
            "pass": number,
            "nth": nth,
            "model": model,
            "phase": phase,
            "mode": "FULL",
            "rids": list(rows),
            "req_rows": [len(ids) for _, ids in rows.values()],
            "n_rows": len(tokens),
            "time": 1000.0 + number,
            **more,
        }
        self.spool.append("pass", header, np.array([tokens, positions], "<i8").tobytes())
        if tensor:
            data = np.array([[nth, r, *row] for r, row in enumerate(zip(tokens, positions, strict=True))])
            self.tensor(number, data.astype(np.float32), name=tensor)
        return number

    def tensor(self, number: int, data: np.ndarray[Any, Any], **header: Any) -> None:
        whole = {
            "pass": number,
            "name": "layer/002",
            "site": "layer",
            "depth": 2,
            "depths": None,
            "chunks": None,
            "dtype": "float32",
            "shape": list(data.shape),
            "rows": None,
        }
        self.spool.append("tensor", whole | header, data.tobytes())

    def stop(self) -> Path:
        self.spool.append("idle", {})
        self.spool.close()
        return self.path


def capture(
    *servers: Server, requests: Mapping[str, RequestTokens] | None = None
) -> tuple[Trace, AssembleSummary]:
    out = servers[0].path.with_name("infer.h5")
    spools = [server.stop() for server in servers]
    summary = assemble(spools, out, provenance={"producer": "test"}, requests=requests)
    return Trace.open(out), summary


def known(prompt: Sequence[int] | None, output: Sequence[int]) -> RequestTokens:
    return RequestTokens(prompt, output)


def rows_of(rank: Rank, number: int) -> dict[str, list[int]]:
    """The labels of one pass."""
    index = rank.passes["id"].tolist().index(number)
    mask = rank.rows["pass"] == index
    return {name: column[mask].tolist() for name, column in rank.rows.items()}


def assert_tensors_lie_on_their_rows(rank: Rank) -> None:
    """Every row of every tensor that `Server.run` wrote carries its own token and position."""
    for tensor in rank.tensors.values():
        values = tensor.read()
        at = tensor.row_index
        assert values[:, 0].tolist() == rank.passes["id"][rank.rows["pass"][at]].tolist()
        assert values[:, 2].tolist() == rank.rows["token"][at].tolist()
        assert values[:, 3].tolist() == rank.rows["position"][at].tolist()
