"""Several tensors are copied into columns of one buffer bit for bit, wherever they lie."""

import pytest
import torch

from hsprobe.probes.sglang.gather import gather


@pytest.mark.parametrize("rows", [1, 5])
def test_tensors_of_any_kind_and_place_are_copied_bit_for_bit(rows):
    wide = torch.randn(rows, 96).to(torch.bfloat16)
    ids = torch.arange(rows).unsqueeze(1)
    sources = [
        wide[:, :40],
        wide[:, 40:],
        ids,
        torch.randn(rows, 3),
        torch.randn(2, rows, 8)[1],
        torch.randn(8, rows).t(),
        torch.randn(rows, 5).to(torch.float8_e4m3fn),
    ]
    buffer = torch.zeros(rows, 1024, dtype=torch.uint8)
    places, at = [], 0
    for source in sources:
        size = source.shape[1] * source.element_size()
        places.append(buffer[:, at : at + size])
        at += -(-size // 16) * 16
    gather(list(zip(places, sources, strict=True)))
    for place, source in zip(places, sources, strict=True):
        assert torch.equal(place, source.contiguous().view(torch.uint8))
