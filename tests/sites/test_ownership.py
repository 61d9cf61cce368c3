"""A parameter that a fold changes may be used elsewhere too: each model below uses one in one more way."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flashnorm.sites.audit import audit
from tests.sites.small import OUT, TOKENS, WIDTH, after_fold, settled


class Model(nn.Module):
    """Two norms, each with its own reader with a bias."""

    def __init__(self, kind=nn.LayerNorm):
        super().__init__()
        self.n1, self.n2 = kind(WIDTH, eps=1e-6), kind(WIDTH, eps=1e-6)
        self.l1, self.l2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, OUT)
        settled(self)
        self.tie()

    def tie(self):
        pass

    def forward(self, x):
        x = x + self.l1(self.n1(x))
        return self.l2(self.n2(x))


class SharedGain(Model):
    def tie(self):
        self.n2.weight = self.n1.weight


class SharedGainByStorage(Model):
    def tie(self):
        self.n2.weight.data = self.n1.weight.data


class SharedNorm(Model):
    def tie(self):
        self.n2.weight, self.n2.bias = self.n1.weight, self.n1.bias


class SharedBias(Model):
    def tie(self):
        self.n2.bias = self.n1.bias


class BiasUsedOutside(Model):
    def forward(self, x):
        return super().forward(x) * self.n2.bias.sum()


class BiasAddedOutside(Model):
    def forward(self, x):
        return super().forward(x) + F.linear(x, self.l1.weight.detach().clone() * 2, self.n2.bias).sum(-1, True)


class GainIsABiasOfAnother(Model):
    def tie(self):
        self.n2.weight = self.n1.bias


class ReadersBiasIsANormsBias(Model):
    def tie(self):
        self.l1.bias = self.n2.bias


class OneBiasOfTwoReadersOnOneLine(Model):
    def tie(self):
        self.other = nn.Parameter(torch.randn(OUT, WIDTH))

    def forward(self, x):
        t = self.n2(x + self.l1(self.n1(x)))
        return F.linear(t, self.l2.weight, self.l2.bias) * F.linear(t, self.other, self.l2.bias)


class ReaderIsAddedToo(Model):
    """The matrix that reads the norm is also what another product is added to."""

    def forward(self, x):
        t = self.n2(x + self.l1(self.n1(x)))
        return self.l2(t) + torch.addmm(self.l2.weight, x[0, :1].expand(OUT, -1), self.l1.weight).sum()


class TiedToWhatNeverRan(Model):
    def tie(self):
        self.unused = nn.Linear(WIDTH, OUT)
        self.unused.weight = self.l2.weight


# The model -> of each norm: is it folded, does its bias move.
CASES = [
    (Model, {"n1": True, "n2": True}),
    (SharedGain, {"n1": False}),
    (SharedGainByStorage, {"n1": False}),
    (SharedNorm, {"n1": True}),
    (SharedBias, {"n1": False, "n2": False}),
    (BiasUsedOutside, {"n1": True, "n2": False}),
    (BiasAddedOutside, {"n1": False, "n2": False}),
    (GainIsABiasOfAnother, {"n1": False, "n2": False}),
    (ReadersBiasIsANormsBias, {"n1": True, "n2": False}),
    (OneBiasOfTwoReadersOnOneLine, {"n1": True, "n2": True}),
    (ReaderIsAddedToo, {"n1": False, "n2": False}),
    (TiedToWhatNeverRan, {"n1": True, "n2": False}),
]


@pytest.mark.parametrize(("cls", "verdicts"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_fold_changes_nothing_else(cls, verdicts):
    model = cls()
    sites = {s.norm: s.foldable for s in audit(model, inputs={"x": torch.randn(2, TOKENS, WIDTH)}).sites}
    _, error = after_fold(model)
    assert error < 1e-5
    assert sites == verdicts


def test_norms_that_share_a_gain_and_have_no_bias_are_one_site():
    class Shared(Model):
        def __init__(self):
            super().__init__(nn.RMSNorm)

        tie = SharedGain.tie

    report, error = after_fold(Shared())
    assert report.folded == ["n1"]
    assert error < 1e-5


def test_a_reader_that_holds_codes_is_a_blocker_and_the_model_stays_whole():
    class Codes(nn.Module):
        def __init__(self, dtype):
            super().__init__()
            codes = torch.randint(-100, 100, (OUT, WIDTH)).to(dtype)
            self.weight = nn.Parameter(codes, requires_grad=False)

        def forward(self, x):
            return F.linear(x, self.weight.to(x.dtype))

    for dtype in (torch.int8, torch.float8_e4m3fn):
        model = Model()
        model.l2 = Codes(dtype)
        report, error = after_fold(model)
        assert report.folded == ["n1"]
        assert "holds codes" in report.skipped["n2"]
        assert error < 1e-5
