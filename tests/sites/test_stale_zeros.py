"""A buffer of zeros is zero until something is written to it; a norm's output added to it then meets other data."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flashnorm.sites.audit import audit

WIDTH = 8


class _Adds(nn.Module):
    """Linear(buffer + norm(x)), where `fill` has put plain data into a buffer of zeros."""

    def __init__(self, fill) -> None:
        super().__init__()
        self.norm, self.linear, self.fill = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False), fill

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        buffer = self.fill(torch.zeros_like(x), x)
        return self.linear(buffer + self.norm(x))


ROW = torch.tensor([0])
FILLS = {
    "add_": lambda zeros, x: zeros.add_(x),
    "sub_": lambda zeros, x: zeros.sub_(x),
    "lerp_": lambda zeros, x: zeros.lerp_(x, 0.5),
    "masked_fill_": lambda zeros, x: zeros.masked_fill_(x > 0, 1.0),
    "index_add_": lambda zeros, x: zeros.index_add_(0, ROW, x[:1]),
    "index_put_": lambda zeros, x: zeros.index_put_((ROW,), x[:1]),
    "masked_scatter_": lambda zeros, x: zeros.masked_scatter_(x > 0, x),
    "scatter_": lambda zeros, x: zeros.scatter_(0, torch.zeros(1, WIDTH, dtype=torch.int64), x[:1]),
}


@pytest.mark.parametrize("fill", FILLS.values(), ids=FILLS)
def test_what_was_written_to_is_no_longer_zero(fill):
    report = audit(_Adds(fill), inputs={"x": torch.randn(3, WIDTH)})
    assert "norm" in report.skipped


def test_what_is_still_zero_takes_any_gain():
    report = audit(_Adds(lambda zeros, x: zeros), inputs={"x": torch.randn(3, WIDTH)})
    assert [site.norm for site in report.foldable] == ["norm"]
