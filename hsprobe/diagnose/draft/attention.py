"""What may be wrong with the draft's attention: RoPE, positions, the keys of cached slots, the mask.

Letters: T rows of the draft.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from hsprobe.diagnose.draft.compute import Attending, Variant
from hsprobe.diagnose.draft.hypotheses import Hypothesis
from hsprobe.diagnose.draft.material import Material
from hsprobe.draft.config import Rope
from hsprobe.draft.rope import KINDS, Rotation
from hsprobe.draft.timeline import Ints
from hsprobe.errors import HsprobeError
from hsprobe.trace.schema import Phase

_BASES = (1e4, 2.5e4, 5e4, 1e5, 1.5e5, 2.5e5, 5e5, 1e6, 1.5e6, 2e6, 3e6, 5e6, 8e6, 1e7, 1.1e8)
_FACTORS = (2.0, 4.0, 8.0)
_OFFSETS = (1, -1, 2, -2)
_NEAR_LIMITS = 24


def of_attention(
    material: Material, served: Mapping[str, Any], target_rope: Rope | None, bad: Ints, fine: Ints
) -> Iterator[Hypothesis]:
    """All that may be wrong with the attention itself.

    Args:
        served: keys of the configuration that the server's draft was loaded with, where the capture tells.
        target_rope: how the target rotates, which a shared cache or a fallback would give the draft.
        bad, fine: rows that differ from what they should be, and rows that do not.
    """
    yield from _positions(material, bad, fine)
    yield from _masks(material, bad, fine)
    yield from _cached(material, bad)
    yield from _ropes(material, served, target_rope)


def _attending(material: Material, **how: Any) -> Variant:
    return Variant(material.ref, attending=Attending(**how))


def _ropes(material: Material, served: Mapping[str, Any], target_rope: Rope | None) -> Iterator[Hypothesis]:
    own = material.ref.config.rope
    where = f"Set it in {material.served_config}; if it stands there already, the server does not follow it."
    plain = replace(own, scaling={})
    tries: list[Rope] = []
    told = _served_rope(own, served)
    if told is not None:
        tries.append(told)
    if target_rope is not None:
        tries.append(replace(target_rope, dims=own.dims, neox=own.neox))
    tries += [replace(own, base=base) for base in _BASES] + [plain]
    tries += [replace(plain, base=base) for base in _BASES]
    tries += [replace(own, scaling={"rope_type": "linear", "factor": factor}) for factor in _FACTORS]
    tried: list[Rope] = [own]
    for rope in tries:
        same = any(_alike(rope, other) for other in tried)
        if same or rope.kind not in KINDS:
            continue
        tried.append(rope)
        try:
            rotation = Rotation(rope)
        except HsprobeError:
            continue
        yield Hypothesis(
            "rope",
            f"the draft rotates with {_rope_words(rope, own)}, its checkpoint's configuration with "
            f"{_rope_words(own, rope)}",
            _attending(material, rotation=rotation),
            _rope_change(rope, own),
            [where],
        )
    yield Hypothesis(
        "rope",
        "the draft rotates nothing: its queries and keys carry no position",
        _attending(material, positions=np.zeros(len(material.rows), np.int64)),
        steps=["Look at how positions reach the rotary embedding."],
    )


def _alike(one: Rope, other: Rope) -> bool:
    scaled = one.kind != "default" or other.kind != "default"
    return one.base == other.base and (
        not scaled or (one.kind, dict(one.scaling)) == (other.kind, dict(other.scaling))
    )


def _served_rope(own: Rope, served: Mapping[str, Any]) -> Rope | None:
    scaling = served.get("rope_parameters") or served.get("rope_scaling")
    scaling = dict(scaling) if isinstance(scaling, dict) else {}
    base = scaling.pop("rope_theta", None) or served.get("rope_theta")
    if str(scaling.get("rope_type") or scaling.get("type") or "default") == "default":
        scaling = {}
    limit = served.get("max_position_embeddings")
    try:
        return replace(own, base=float(base or own.base), scaling=scaling, limit=int(limit or own.limit))
    except (TypeError, ValueError):
        return None


def _rope_words(rope: Rope, other: Rope) -> str:
    words = f"base {rope.base:g}"
    if rope.kind == other.kind == "default":
        return words
    if rope.kind == "default":
        return f"{words} and no scaling"
    numbers = ", ".join(f"{k} {v}" for k, v in rope.scaling.items() if k not in ("rope_type", "type"))
    return f"{words} and {rope.kind} scaling ({numbers})"


def _rope_change(served: Rope, own: Rope) -> str:
    if served.kind == own.kind == "default" or dict(served.scaling) == dict(own.scaling):
        return f"rope_theta: {served.base:g}  ->  {own.base:g}"

    def text(rope: Rope) -> str:
        return (
            json.dumps({"rope_theta": rope.base, **rope.scaling})
            if rope.scaling
            else f"rope_theta {rope.base:g}"
        )

    return f"{text(served)}  ->  {text(own)}"


def _positions(material: Material, bad: Ints, fine: Ints) -> Iterator[Hypothesis]:
    rows, due = material.rows, material.positions
    names = {
        int(Phase.DRAFT_DECODE): "in the steps after the first",
        int(Phase.DRAFT_EXTEND): "in draft extend",
        int(Phase.PREFILL): "in prefill",
    }
    for phase, where in names.items():
        mine = rows.phase == phase
        for offset in _OFFSETS:
            yield Hypothesis(
                "position",
                f"the draft's RoPE positions are {abs(offset)} too {'high' if offset > 0 else 'low'} {where}",
                _attending(material, positions=np.where(mine, np.maximum(due + offset, 0), due)),
                steps=[
                    "A row's position is that of the target's state it takes; each step of a chain adds one."
                ],
            )
    chain = rows.step > 0
    yield Hypothesis(
        "position",
        "the draft's RoPE position does not advance from step to step",
        _attending(material, positions=np.where(chain, due - rows.step + 1, due)),
        steps=["Each step of a chain adds one to the position of the step before."],
    )
    yield from _limits(material, bad, fine)


def _limits(material: Material, bad: Ints, fine: Ints) -> Iterator[Hypothesis]:
    due = material.positions
    if not len(bad):
        return
    first = int(due[bad].min())
    last = max((int(s) for s in due[fine] if s < first), default=first - 1)
    for limit in [first, *range(first - 1, max(last, first - _NEAR_LIMITS), -1)]:
        if limit < 2:
            continue
        for words, positions in (
            ("stay at the last one", np.minimum(due, limit - 1)),
            ("start again at 0", np.where(due >= 0, due % limit, due)),
        ):
            yield Hypothesis(
                "position",
                f"from position {limit} on the draft's RoPE positions {words}",
                _attending(material, positions=positions),
                f"max_position_embeddings: {limit}  ->  {max(material.ref.config.rope.limit, limit + 1)}",
                [
                    "The table of rotations ends there: set it in the served draft's config.json to what the "
                    "draft was trained for, at least the longest request."
                ],
            )


def _masks(material: Material, bad: Ints, fine: Ints) -> Iterator[Hypothesis]:
    rows = material.rows
    if len(bad):
        first = int(rows.slot[bad].min())
        last = max((int(s) for s in rows.slot[fine] if s < first), default=0)
        for window in range(first - 1, max(last - 2, first - 1 - _NEAR_LIMITS, -1), -1):
            if window >= 0:
                yield Hypothesis(
                    "mask",
                    f"a row of the draft sees only the {window} before it: a sliding window that it was not "
                    "trained with",
                    _attending(material, window=window),
                    f"--speculative-draft-window-size: {window}  ->  unset",
                    ["Serve without the window, or train with it."],
                )
    yield Hypothesis(
        "mask",
        "rows of the draft see later rows of their own pass: the causal mask is missing",
        _attending(material, causal=False),
        steps=["Mask the attention of extend passes causally."],
    )
    yield Hypothesis(
        "mask",
        "rows of the draft see none of the passes before their own",
        _attending(material, prefix=False),
        steps=["Give the draft's extend and decode passes the prefix of the request."],
    )
    if material.ref.window is not None:
        yield Hypothesis(
            "mask",
            "rows of the draft see everything before them, though it was trained with a window",
            _attending(material),
            steps=["Serve with --speculative-draft-window-size."],
        )


def _cached(material: Material, bad: Ints) -> Iterator[Hypothesis]:
    rows = material.rows
    if not (rows.cached[bad] > 0).any():
        return
    steps = [
        "Keep the draft's keys with the prefix cache under both the token and the one that follows (bigram "
        "keys), or compute the last cached slot again; --disable-radix-cache shows what it costs."
    ]
    twins = _other_followers(material, bad)
    if twins:
        yield Hypothesis(
            "kv",
            "after a prefix hit, the draft's last cached key was computed with another next token",
            _attending(material, stale=twins),
            steps=steps,
        )
    for stale, words in (
        ("zero", "keys of the cached prefix are zero"),
        ("last zero", "last cached key is zero"),
    ):
        yield Hypothesis(
            "kv",
            f"after a prefix hit, the draft's {words}: never written",
            _attending(material, stale=stale),
            steps=steps,
        )


def _other_followers(material: Material, rows: Ints) -> dict[int, int]:
    """Row -> an earlier row at its last cached slot that was fed another next token."""
    found: dict[int, int] = {}
    known: dict[tuple[int, int], int] = {}
    for row in rows.tolist():
        cached = int(material.rows.cached[row])
        if not cached:
            continue
        key = (int(material.rows.request[row]), cached)
        if key not in known:
            known[key] = (material.rows.twins(row, cached - 1) or [-1])[-1]
        if known[key] >= 0:
            found[row] = known[key]
    return found
