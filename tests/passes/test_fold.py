"""In-memory folds: all or nothing, one rounding, and the same numbers as on disk."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flashnorm.errors import Refusal, TracingError
from flashnorm.passes.fold import apply_fold, fold
from flashnorm.sites.audit import audit
from tests.sites.small import OUT, TOKENS, WIDTH, after_fold, settled


class Model(nn.Module):
    """Two norms, a reader with a bias behind the first and one without behind the second."""

    def __init__(self, kind=nn.RMSNorm):
        super().__init__()
        self.n1, self.n2 = kind(WIDTH, eps=1e-6), kind(WIDTH, eps=1e-6)
        self.l1, self.l2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, OUT, bias=False)
        settled(self)

    def forward(self, x):
        return self.l2(self.n2(x + self.l1(self.n1(x))))


def x(dtype=torch.float32):
    return torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def refused(model, words, inputs):
    before = state(model)
    with pytest.raises(Refusal, match=words):
        fold(model, inputs={"x": inputs})
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items() if not value.is_meta)


@pytest.mark.parametrize("kind", [nn.RMSNorm, nn.LayerNorm])
def test_gains_become_one_and_the_output_stays(kind):
    model = Model(kind)
    report, error = after_fold(model)
    assert report.folded == ["n1", "n2"]
    assert error < 1e-5
    assert bool((model.n1.weight == 1).all() and (model.n2.weight == 1).all())


def test_inputs_reach_models_that_take_unusual_ones():
    with pytest.raises(TracingError, match="could not be run on input_ids"):
        fold(Model())
    assert fold(Model(), inputs={"x": x()}).folded == ["n1", "n2"]


@pytest.mark.parametrize("which", ["n1", "n2"])
def test_a_weight_that_would_overflow_is_refused_and_nothing_is_changed(which):
    model = Model().half()
    norm, reader = getattr(model, which), {"n1": model.l1, "n2": model.l2}[which]
    with torch.no_grad():
        norm.weight.fill_(400.0)
        reader.weight[0, 0] = 300.0
    refused(model, rf"{'l' + which[1]}\.weight does not fit torch\.float16", x(torch.float16))


def test_a_bias_that_would_overflow_is_refused_and_nothing_is_changed():
    model = Model(nn.LayerNorm).half()
    with torch.no_grad():
        model.n1.bias.fill_(3e4)
        model.l1.weight.fill_(1.0)
    refused(model, r"l1\.bias does not fit torch\.float16", x(torch.float16))


@pytest.mark.parametrize("own", ["weight", "bias"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gain_or_bias_that_is_not_finite_is_refused_and_nothing_is_changed(own, value):
    model = Model(nn.LayerNorm)
    with torch.no_grad():
        getattr(model.n2, own)[3] = value
    with pytest.raises(Refusal, match="of n2 is not finite at channel 3"):
        fold(model, inputs={"x": x()})
    assert not bool((model.n1.weight == 1).all())


def test_a_weight_that_is_not_in_memory_is_refused_and_nothing_is_changed():
    model = Model()
    model.l2.to("meta")
    refused(model, r"l2\.weight has no values in memory", x())


def test_a_kept_bias_that_would_overflow_keeps_its_norm_from_folding():
    model = Model(nn.LayerNorm).half()
    with torch.no_grad():
        model.n2.weight[3], model.n2.bias[3] = 1e-5, 2.0
    report = fold(model, inputs={"x": x(torch.float16)})
    assert report.folded == ["n1"]
    assert report.skipped["n2"].endswith("does not fit torch.float16 once divided by the gain at channel 3")
    assert bool(torch.isfinite(model.n2.bias).all())


def test_a_zero_gain_whose_bias_must_stay_keeps_its_norm_from_folding():
    model = Model(nn.LayerNorm)
    with torch.no_grad():
        model.n2.weight[3] = 0.0
    report, error = after_fold(model)
    assert "zero at channel 3" in report.skipped["n2"]
    assert error < 1e-5


def test_a_forced_fold_of_a_blocked_site_shows_that_the_check_above_can_fail():
    class Residual(Model):
        def forward(self, x):
            return self.l2(x + self.n2(x)) + self.l2(self.n1(x))

    model = Residual()
    before = model(x())
    apply_fold(model, audit(model, inputs={"x": x()}).sites)
    assert not torch.allclose(model(x()), before, rtol=1e-3)


@pytest.mark.gpu
def test_a_model_on_the_gpu_is_folded_there():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")

    class Halves(Model):
        def forward(self, x):
            t = self.n2(x + self.l1(self.n1(x)))
            return self.l2(torch.cat([t[..., WIDTH // 2 :], t[..., : WIDTH // 2]], -1))

    model = Halves(nn.LayerNorm).cuda()
    with torch.no_grad():
        before = model(x().cuda())
        report = fold(model, inputs={"x": x().cuda()})
        assert report.folded == ["n1", "n2"]
        torch.testing.assert_close(model(x().cuda()), before, rtol=1e-5, atol=1e-5)
