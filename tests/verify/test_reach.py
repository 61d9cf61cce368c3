from __future__ import annotations

import torch
from torch import nn

from flashnorm.verify.reach import differing, fingerprints, unused_weights


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.called, self.read, self.shape_only, self.never = (nn.Linear(3, 3) for _ in range(4))
        self.transposed = nn.Parameter(torch.randn(3, 3))
        self.tied = nn.Linear(3, 3, bias=False)
        self.tied.weight = self.called.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.cat([self.called(x).to(self.shape_only.weight.dtype), x @ self.transposed.mT])
        return nn.functional.linear(y, self.read.weight).view(-1, self.shape_only.weight.shape[0])


def test_only_weights_that_take_part_are_used() -> None:
    model = _Model()
    with unused_weights(model) as unused:
        model(torch.randn(2, 3))
    assert unused == {"read.bias", "shape_only.weight", "shape_only.bias", "never.weight", "never.bias"}


def test_fingerprints_tell_values_apart() -> None:
    model = _Model()
    ours = fingerprints(model, {"never.weight", "never.bias"})
    model.never.weight.data[0, 0] += 1
    theirs = fingerprints(model, {"never.weight", "never.bias"})
    assert differing(ours, ours) == ()
    assert differing(ours, theirs) == ("never.weight",)
    assert differing(ours, {}) == ("never.bias", "never.weight")
