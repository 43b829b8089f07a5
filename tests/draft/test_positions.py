"""Where a release of SGLang puts the steps of a chain."""

import numpy as np
import pytest

from hsprobe.draft.positions import due, steps_late
from hsprobe.draft.timeline import Timeline


@pytest.mark.parametrize(
    ("version", "late"),
    [
        ("0.5.9", 1),
        ("0.5.10.post1", 1),
        ("0.5.11", 1),
        ("0.5.12.post1", 0),
        ("0.5.23", 0),
        ("0.6.0", 0),
        (None, 0),
    ],
)
def test_the_gap_is_that_of_old_releases(version, late):
    assert steps_late(version) == late


def test_only_steps_with_a_place_stand_past_it():
    nothing = {name: np.zeros(5) for name in Timeline.__dataclass_fields__ if name not in ("slot", "step")}
    rows = Timeline(**nothing, slot=np.array([3, 4, 5, 6, -1]), step=np.array([0, 0, 1, 2, 1]))
    assert due(rows, 1).tolist() == [3, 4, 6, 7, -1]
    assert due(rows, 0).tolist() == rows.slot.tolist()
