"""What the server itself counted, out of a trace's provenance, which may lack any of it or hold anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hsprobe.impact.model import Acceptance
from hsprobe.trace.reader import Trace
from hsprobe.trace.schema import Model, Phase

# 0.5.15 renamed it; until 0.5.15 the old name is there too.
_HISTOGRAMS = ("spec_correct_drafts_histogram", "spec_accept_histogram")


@dataclass(frozen=True)
class Served:
    """How the server drafted.

    Attributes:
        steps, topk: `speculative_num_steps` and `speculative_eagle_topk`, None where not recorded.
        dtype: the dtype that the draft ran in, None where not recorded.
    """

    steps: int | None
    topk: int | None
    dtype: str | None
    draft: str | None
    target: str | None


def served(trace: Trace) -> Served:
    """Read it from the provenance of a capture; steps that it does not say are read off its verify passes."""
    provenance = trace.provenance
    arguments, draft, model = (_dict(provenance.get(name)) for name in ("server_args", "draft", "model"))
    return Served(
        _count(arguments.get("speculative_num_steps")) or _verified(trace),
        _count(arguments.get("speculative_eagle_topk")),
        _text(draft.get("dtype")) or _text(model.get("dtype")),
        _text(draft.get("path")),
        _text(model.get("path")),
    )


def _verified(trace: Trace) -> int | None:
    """Drafted tokens a verify pass: the rows of a chain less that of the newest token; None without any."""
    for rank in trace.ranks:
        mine = (rank.passes["phase"] == Phase.VERIFY) & (rank.passes["model"] == Model.TARGET)
        rows = np.flatnonzero(mine[rank.rows["pass"]] & (rank.rows["request"] >= 0))
        if len(rows):
            last = rank.rows["pass"][rows[0]], rank.rows["request"][rows[0]]
            same = (rank.rows["pass"] == last[0]) & (rank.rows["request"] == last[1])
            return int(np.count_nonzero(same)) - 1
    return None


def by_request(provenance: dict[str, Any], steps: int) -> dict[str, Acceptance]:
    """Request id -> what the server counted for it, where it did."""
    found: dict[str, Acceptance] = {}
    requests = provenance.get("requests")
    for facts in requests if isinstance(requests, list) else []:
        facts = _dict(facts)
        rid, tokens, passes = facts.get("rid"), facts.get("completion_tokens"), facts.get("spec_verify_ct")
        counted = _count(tokens), _count(passes)
        if isinstance(rid, str) and counted[0] and counted[1]:
            found[rid] = Acceptance(counted[0], counted[1], _histogram(facts, steps))
    return found


def _histogram(facts: dict[str, Any], steps: int) -> list[int]:
    for name in _HISTOGRAMS:
        values = facts.get(name)
        if isinstance(values, list) and len(values) <= steps + 1:
            counts = [_count(value) or 0 for value in values]
            return counts + [0] * (steps + 1 - len(counts))
    return [0] * (steps + 1)


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
