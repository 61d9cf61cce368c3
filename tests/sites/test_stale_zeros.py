"""A buffer of zeros is zero until something is written to it; a norm's output added to it then meets other data."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flashnorm.sites.audit import audit
from flashnorm.sites.hollow import settle_values

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


class _Scaled(nn.Module):
    """Linear(x + alpha * norm(x)), where alpha is zero when the model is built; the product must not count as zero."""

    def __init__(self, hold, use) -> None:
        super().__init__()
        self.norm, self.linear = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.use = use
        hold(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x + self.use(self, x) * self.norm(x))


def parameter(*shape):
    return lambda model: model.register_parameter("alpha", nn.Parameter(torch.zeros(shape)))


def buffer(model):
    model.register_buffer("alpha", torch.zeros(()))


def nothing(model):
    model.alpha = None


NUMBERS = {
    "scalar parameter": (parameter(), lambda model, x: model.alpha),
    "parameter of one element": (parameter(1), lambda model, x: model.alpha),
    "element of a parameter": (parameter(4), lambda model, x: model.alpha[2]),
    "scalar buffer": (buffer, lambda model, x: model.alpha),
    "cast": (parameter(), lambda model, x: model.alpha.double().float()),
    "computed": (parameter(), lambda model, x: torch.tanh(model.alpha)),
    "read": (parameter(), lambda model, x: model.alpha.item()),
    "read and rebuilt": (parameter(), lambda model, x: torch.tensor(float(model.alpha))),
    "of the inputs": (nothing, lambda model, x: (x.max() > 1e9).float()),
}


@pytest.mark.parametrize(("hold", "use"), NUMBERS.values(), ids=NUMBERS)
def test_a_number_that_is_zero_when_the_model_is_built_is_no_structural_zero(hold, use):
    report = audit(_Scaled(hold, use), inputs={"x": torch.randn(3, WIDTH)})
    (site,) = report.blocked
    assert "residual-add" in [blocker.kind for blocker in site.blockers]


LITERALS = {
    "python number": lambda model, x: 0.0,
    "tensor": lambda model, x: torch.tensor(0.0),
    "cast tensor": lambda model, x: torch.tensor(0.0).double().to(x.dtype),
    "full": lambda model, x: torch.full((), 0.0),
    "zeros": lambda model, x: torch.zeros(()),
    "zero times data": lambda model, x: 0.0 * x.sum(),
}


@pytest.mark.parametrize("use", LITERALS.values(), ids=LITERALS)
def test_a_literal_zero_is_a_structural_zero(use):
    """What is multiplied by it vanishes, and `linear` reads data alone."""
    report = audit(_Scaled(nothing, use), inputs={"x": torch.randn(3, WIDTH)})
    (site,) = report.blocked
    assert [blocker.kind for blocker in site.blockers] == ["unread"]


def test_a_branch_that_a_scale_of_zero_would_skip_is_taken():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.alpha = nn.Parameter(torch.zeros(()))

    model = Gated()
    settle_values(model)
    assert model.alpha != 0
