"""Dynamic tanh in the place of a norm: its weight and bias fold into the next linear like a gain and a bias."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from flashnorm.cli.transform_rows import full_dict, transforms_tables
from flashnorm.passes.cancel import cancel
from flashnorm.passes.fold import apply_fold, fold
from flashnorm.runtime.planning import Stock, plan_site
from flashnorm.sites.audit import audit
from flashnorm.sites.probing import is_candidate, probe
from flashnorm.sites.transforms import audit_fully


class DyT(nn.Module):
    """As published: one slope, a weight and a bias for each channel."""

    def __init__(self, width, alpha=0.5, bias=True):
        super().__init__()
        self.alpha = nn.Parameter(torch.full((1,), alpha))
        self.weight = nn.Parameter(torch.randn(width) * 0.5 + 0.7)
        self.bias = nn.Parameter(torch.randn(width)) if bias else None

    def forward(self, x):
        out = torch.tanh(self.alpha * x) * self.weight
        return out if self.bias is None else out + self.bias


class Model(nn.Module):
    """A DyT that two linears read, and one whose reader has no bias to take its own."""

    def __init__(self, width=8, alpha=0.5, bias=True):
        super().__init__()
        torch.manual_seed(0)
        self.n1, self.n2 = DyT(width, alpha, bias), DyT(width, alpha, bias)
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)
        self.c = nn.Linear(width, 3, bias=False)
        self.eval()

    def forward(self, x):
        h = self.n1(x)
        return self.c(self.n2(x + self.a(h) * torch.sigmoid(self.b(h))))


def x(width=8):
    return torch.randn(2, 5, width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(width=st.sampled_from([2, 8, 24]), alpha=st.sampled_from([0.0, 0.02, 0.5, -1.5]), bias=st.booleans())
@torch.no_grad()
def test_weight_and_bias_move_and_the_output_stays(width, alpha, bias):
    model = Model(width, alpha, bias).double()
    before = model(x(width))
    assert fold(model, inputs={"x": x(width)}).folded == ["n1", "n2"]
    assert bool((model.n1.weight == 1).all() and (model.n2.weight == 1).all())
    assert not bias or bool((model.n1.bias == 0).all())
    # Each weight is rounded once, each bias takes a sum of `width` products: some tens of 2^-53.
    torch.testing.assert_close(model(x(width)), before, rtol=1e-13, atol=1e-13)


@torch.no_grad()
def test_a_forced_fold_of_a_blocked_dyt_is_seen_by_the_comparison():
    class Residual(Model):
        def forward(self, x):
            return super().forward(x) + self.n1(x).sum(-1, keepdim=True)

    model = Residual().double()
    before = model(x())
    report = audit(model, inputs={"x": x()})
    blocked = next(site for site in report.sites if site.norm == "n1")
    assert "different gains" in blocked.reason
    apply_fold(model, [blocked])
    assert (model(x()) - before).abs().max() > 1e-2


def test_the_audit_calls_it_what_it_is():
    full = audit_fully(Model(), inputs={"x": x()})
    report = full.report
    assert [site.convention.name for site in report.sites] == ["DyT w +bias"] * 2
    assert {site["convention"]["kind"] for site in full_dict(full)["sites"]} == {"DyT"}
    assert transforms_tables(full)[0].row_count == 2


def test_it_is_no_norm_that_could_be_dropped_or_drop_another():
    class Chain(Model):
        def forward(self, x):
            return torch.tanh(self.n2(nn.functional.linear(self.n1(x), self.a.weight)))

    report = cancel(Chain().double(), inputs={"x": x()})
    assert report.skipped == dict.fromkeys(("n1", "n2"), "it does not divide a row by one number")


def test_an_accelerated_model_keeps_it():
    model = Model(bias=False)
    report = audit(model, inputs={"x": x()})
    with pytest.raises(Stock, match="groups of 1 of its 8 channels"):
        plan_site(model, report.foldable[0], report, None)


class Silu(DyT):
    def forward(self, x):
        return nn.functional.silu(self.alpha * x) * self.weight + self.bias


class Mixing(DyT):
    """Bounded, but its channels answer to each other."""

    def forward(self, x):
        return torch.tanh(self.alpha * x) * self.weight / (1 + x.square().mean(-1, keepdim=True)) + self.bias


class Scale(DyT):
    def forward(self, x):
        return self.alpha * x * self.weight + self.bias


class Shifted(DyT):
    def forward(self, x):
        return torch.tanh(self.alpha * x + 1) * self.weight + self.bias


@pytest.mark.parametrize("kind", [Silu, Mixing, Scale, Shifted])
def test_what_only_looks_like_one_is_not_one(kind):
    module = kind(8)
    assert is_candidate(module)
    assert probe(module, (torch.randn(2, 3, 8),), {}) is None


def test_a_slope_keeps_its_value():
    model = Model(alpha=0.25)
    fold(model, inputs={"x": x().float()})
    assert model.n1.alpha.item() == 0.25
