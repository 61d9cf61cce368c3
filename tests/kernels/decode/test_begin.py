from __future__ import annotations

import pytest
import torch

from tests.kernels import cases

cases.need_triton()
from flashnorm.kernels.decode.begin import begin  # noqa: E402


@pytest.mark.parametrize(("width", "multiplier"), [(48, 1.0), (1024, 0.5), (2880, 12.0)])
def test_rows_tokens_and_positions(width, multiplier):
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(31, width, generator=generator).to(cases.DEVICE, cases.HALF)
    chosen = torch.tensor([7, 30, 0, 5], device=cases.DEVICE)
    lengths = torch.tensor([100, 0, 3, 9], device=cases.DEVICE)
    slots = torch.tensor([3, 1, 3], device=cases.DEVICE)
    x, positions = begin(slots, chosen, lengths, embedding, multiplier)
    assert positions.tolist() == [9, 0, 9]
    assert torch.equal(x, (embedding[[5, 30, 5]].float() * multiplier).to(embedding.dtype))
