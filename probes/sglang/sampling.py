"""Which steps, requests and rows to record: always-on capture keeps a part of the traffic."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import Any

from hsprobe.probes.sglang.pressure import POLICIES

Runs = list[tuple[int, int]]
"""Rows of a pass as [first, last) runs."""


@dataclass(frozen=True)
class Sampling:
    """A choice of what to record.

    Attributes:
        every: of the scheduler's steps, record every n-th: the target's pass and all of the draft's.
        requests: record only requests whose id matches this shell pattern.
        rows: of each request, record only the last n rows of a prefill pass.
        on_pressure: what to do when the writer falls behind, see `pressure.Pressure`.
        check: read each pass of a CUDA graph a second time, and record a checksum of that; slow.
    """

    every: int = 1
    requests: str | None = None
    rows: int | None = None
    on_pressure: str = "drop"
    check: bool = False

    def __post_init__(self) -> None:
        if self.every < 1 or (self.rows is not None and self.rows < 1):
            raise ValueError("every and rows count from 1")
        if self.on_pressure not in POLICIES:
            raise ValueError(f"on_pressure is one of {', '.join(POLICIES)}, not {self.on_pressure!r}")

    def changed(self, text: str) -> Sampling:
        """With what the JSON object `text` says; an empty text changes nothing.

        Raises:
            ValueError: it is not such an object.
        """
        if not text.strip():
            return self
        known = {field.name for field in fields(self)}
        said = json.loads(text)
        if not isinstance(said, dict):
            raise ValueError("not a JSON object")
        wrong = [f"{name}={value!r}" for name, value in said.items() if not _fits(name, value)]
        if wrong:
            raise ValueError(f"not understood: {', '.join(wrong)}")
        return replace(self, **{name: value for name, value in said.items() if name in known})

    def wants_any(self, rids: Sequence[str]) -> bool:
        """Whether a step with these requests holds one that is to be recorded."""
        return self.requests is None or any(fnmatchcase(rid, self.requests) for rid in rids)

    def choose(self, phase: str, rids: Sequence[str], req_rows: Sequence[int]) -> Runs | None:
        """The rows to keep of each request, an empty run for none; None where all of the pass are kept."""
        most = self.rows if phase == "prefill" else None
        if self.requests is None and most is None:
            return None
        runs, first, whole = [], 0, True
        for rid, n_rows in zip(rids, req_rows, strict=True):
            stop = first + n_rows
            start = first if most is None else max(first, stop - most)
            if self.requests is not None and not fnmatchcase(rid, self.requests):
                start = stop
            whole &= start == first
            runs.append((start, stop))
            first = stop
        return None if whole else runs


def _fits(name: str, value: Any) -> bool:
    if name in ("every", "rows"):
        return type(value) is int and value >= 1
    if name == "on_pressure":
        return value in POLICIES
    if name == "check":
        return isinstance(value, bool)
    return name != "requests" or value is None or isinstance(value, str)


def from_environment(environment: Mapping[str, str]) -> Sampling:
    """Read ``HSPROBE_EVERY``, ``HSPROBE_REQUESTS``, ``HSPROBE_ROWS`` and ``HSPROBE_ON_PRESSURE``.

    Raises:
        ValueError: one of them cannot be understood.
    """
    rows = environment.get("HSPROBE_ROWS")
    return Sampling(
        every=int(environment.get("HSPROBE_EVERY") or 1),
        requests=environment.get("HSPROBE_REQUESTS") or None,
        rows=int(rows) if rows else None,
        on_pressure=environment.get("HSPROBE_ON_PRESSURE") or "drop",
    )
