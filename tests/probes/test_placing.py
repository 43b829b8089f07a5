"""A tensor's rows are found in the pass, or refused: never taken for others."""

import pytest
import torch

from hsprobe.probes.sglang.placing import Extent, NotRecordable, place


def rows(n: int, extent: Extent, **how) -> list[int]:
    """Rows of the pass that the first rows of a tensor are."""
    placed = place(n, extent, **how)
    if placed.rows is None:
        return list(range(placed.count))
    return list(range(placed.rows["first"], placed.rows["first"] + placed.rows["count"]))


def test_tensors_hold_all_rows_or_one_a_request_or_are_refused():
    extent = Extent(n_rows=8, n_padded=8, n_requests=2)
    assert place(8, extent).rows is None
    assert place(2, extent, last=True).rows == "last"
    for n in (2, 3):
        with pytest.raises(NotRecordable, match=f"{n} rows in a pass of 8 rows and 2 requests"):
            place(n, extent)


def test_padding_rows_come_last_and_a_trimmed_tensor_has_none():
    extent = Extent(n_rows=5, n_padded=8, n_requests=5)
    assert rows(8, extent) == list(range(8))
    assert rows(5, extent) == list(range(5))
    assert place(5, extent).rows == {"first": 0, "count": 5}
    with pytest.raises(NotRecordable, match="in a pass of 5 rows padded to 8"):
        place(6, extent)


@pytest.mark.parametrize("whole", [1, 2, 5, 7, 8, 13])
@pytest.mark.parametrize("parts", [2, 3, 4, 8])
def test_slices_of_either_cut_are_the_rows_that_the_rank_holds(whole: int, parts: int):
    """`tensor_split`, and equal parts of rows padded to a multiple."""
    index = torch.arange(whole)
    padded = torch.cat([index, torch.full((-whole % parts,), -1)])
    for part in range(parts):
        extent = Extent(whole, whole, 1, part, parts)
        for held in (index.tensor_split(parts)[part], padded.chunk(parts)[part]):
            expected = [row for row in held.tolist() if row >= 0]
            assert rows(len(held), extent, scattered=True) == expected


def test_a_slice_is_recognised_where_sglang_does_not_say():
    assert rows(4, Extent(8, 8, 1, part=1, n_parts=2)) == [4, 5, 6, 7]
    assert place(4, Extent(8, 8, 1, part=1, n_parts=2)).is_slice
    assert not place(8, Extent(8, 8, 1, part=1, n_parts=2)).is_slice
    with pytest.raises(NotRecordable):
        place(5, Extent(8, 8, 1, part=1, n_parts=2))
    with pytest.raises(NotRecordable):
        place(4, Extent(8, 8, 1, part=1, n_parts=2), scattered=False)
    with pytest.raises(NotRecordable, match="otherwise than by attention TP"):
        place(4, Extent(8, 8, 1), scattered=True)
