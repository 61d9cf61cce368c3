"""Norms that do more than a norm does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flashnorm.sites.audit import audit
from tests.sites.small import OUT, TOKENS, WIDTH, after_fold, settled

X = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))


class Norm(nn.Module):
    """A norm that calls `more(self, x, out)` for its output."""

    def __init__(self, more=lambda norm, x, out: out):
        super().__init__()
        self.weight, self.more, self.kept = nn.Parameter(torch.rand(WIDTH) + 0.5), more, None

    def forward(self, x, *others):
        return self.more(self, x, nn.functional.rms_norm(x, (WIDTH,), eps=1e-6) * self.weight)


class Model(nn.Module):
    """linear(norm(x)), then what `after(model, norm's output)` makes of it."""

    def __init__(self, norm: Norm, after=lambda model, t: model.linear(t)):
        super().__init__()
        self.norm, self.after = norm, after
        self.sibling, self.linear, self.other = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, OUT), nn.Linear(WIDTH, OUT)
        self.register_buffer("scale", torch.zeros(WIDTH))
        self.norm.around = [self]  # out of sight of `modules()`
        settled(self)
        nn.init.ones_(self.sibling.weight)  # as when a model is built: nothing to see in the numbers

    def forward(self, x):
        return self.after(self, self.norm(x)) + self.other(self.sibling(x))


def reasons(model):
    return audit(model, inputs={"x": X}).skipped


def test_a_plain_norm_is_folded():
    report, error = after_fold(Model(Norm()))
    assert sorted(report.folded) == ["norm", "sibling"]
    assert error < 1e-5


def test_a_foreign_gain_blocks_both_norms():
    model = Model(Norm(lambda norm, x, out: out * norm.around[0].sibling.weight))
    assert "it also applies sibling.weight" in reasons(model)["norm"]
    assert "its gain is also used outside of the norm by mul" in reasons(model)["sibling"]
    report, error = after_fold(model)
    assert report.folded == []
    assert error == 0


def test_a_foreign_buffer_blocks():
    model = Model(Norm(lambda norm, x, out: out + norm.around[0].scale))
    assert "it also applies scale, which is not its own" in reasons(model)["norm"]
    assert "sibling" not in reasons(model)


def test_a_foreign_weight_blocks_as_an_argument_too():
    class Passing(Model):
        def forward(self, x):
            return self.linear(self.norm(x, self.sibling.weight)) + self.other(self.sibling(x))

    class Scaled(Norm):
        def forward(self, x, scale):
            return super().forward(x) * scale

    assert reasons(Passing(Scaled())).keys() == {"norm", "sibling"}


def test_a_norm_may_normalise_a_parameter():
    """Learnt queries, for one. Where they are a reader as well, that reader has another use."""

    class Queries(Model):
        def forward(self, x):
            return self.linear(self.norm(self.other.weight)) + self.other(self.sibling(x)).mean()

    skipped = reasons(Queries(Norm()))
    assert "norm" not in skipped
    assert "other.weight is also used by" in skipped["sibling"]


def test_a_gain_that_reaches_a_norm_out_of_sight_is_seen():
    """The sibling's output gets into the norm without being an argument of it."""

    class Hidden(Model):
        def forward(self, x):
            self.seen = self.sibling(x)
            return self.linear(self.norm(x)) + self.other(self.seen)

    def reads(norm, x, out):
        seen = getattr(norm.around[0], "seen", None)
        return out if seen is None or seen.shape != x.shape else out + 0.0 * seen.relu()

    assert "it is read by another norm" in reasons(Hidden(Norm(reads)))["sibling"]


def test_a_norm_that_branches_on_its_gain_blocks():
    model = Model(Norm(lambda norm, x, out: -out if bool((norm.weight * 1.0 > 2.0).all()) else out))
    assert "its values are taken out of PyTorch by _local_scalar_dense" in reasons(model)["norm"]


def test_another_weight_is_not_folded_into_where_a_norm_uses_it():
    """The reader `linear.weight` is also used inside of a norm, where no product of the trace sees it."""
    model = Model(Norm(lambda norm, x, out: out + 0.0 * norm.around[0].other.weight[0]))
    assert "other.weight is also used by" in reasons(model)["sibling"]


def keeps(norm, x, out):
    norm.kept = out.clone()
    return out


def keeps_the_gain(norm, x, out):
    norm.kept = 1.0 * norm.weight
    return out


def keeps_the_same(norm, x, out):
    norm.kept = out
    return out


def reads_kept(model, t):
    return model.linear(t) + model.norm.kept[..., :OUT]


@pytest.mark.parametrize("keep", [keeps, keeps_the_gain])
def test_a_value_that_a_norm_keeps_for_others_blocks(keep):
    model = Model(Norm(keep), reads_kept)
    assert "keeps is used outside of it" in reasons(model)["norm"]


def test_an_output_that_is_kept_is_followed():
    model = Model(Norm(keeps_the_same), reads_kept)
    assert "residual" not in reasons(model).get("norm", "")
    assert "norm" in reasons(model)
    folded = Model(Norm(keeps_the_same), lambda model, t: model.linear(model.norm.kept))
    report, error = after_fold(folded)
    assert "norm" in report.folded
    assert error < 1e-5


def test_what_is_kept_and_not_read_blocks_nothing():
    report, error = after_fold(Model(Norm(keeps)))
    assert "norm" in report.folded
    assert error < 1e-5


def test_a_norm_that_reads_what_another_has_kept_blocks_it():
    def reads(norm, x, out):
        return out * norm.around[0].norm.kept

    class Second(Model):
        def __init__(self):
            super().__init__(Norm(keeps))
            self.sibling = Norm(reads)
            self.sibling.around = [self]

    assert "keeps is used outside of it" in reasons(Second())["norm"]
