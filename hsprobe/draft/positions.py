"""The RoPE positions that a release of SGLang gives the rows of a draft.

A row fed by the target has the position of the state that it takes, and each step of a chain one more than
the step before: its place in the request. Up to 0.5.11 the worker adds one before each step rather than after
it, so that all steps of a chain stand one past their place (`speculative/eagle_worker.py:draft_forward`).
That is how the release serves every draft; a draft that was trained without the gap is a little worse for it.
"""

from __future__ import annotations

import numpy as np

from hsprobe.draft.timeline import Ints, Timeline
from hsprobe.formats.sglang_ids import parse_version

STEPS_AT_THEIR_PLACE = (0, 5, 12, 1)
"""The first release without the gap."""


def steps_late(version: str | None) -> int:
    """By how many positions the steps of a chain stand past their place in this release of SGLang."""
    number = parse_version(version)
    return int(number is not None and number < STEPS_AT_THEIR_PLACE)


def due(rows: Timeline, late: int) -> Ints:
    """[T] the position that each row is to have, below 0 where its place is not known."""
    return np.where((rows.step > 0) & (rows.slot >= 0), rows.slot + late, rows.slot)
