"""One audit, four verdicts; that of deferral is tried out, the others have tests of their own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flashnorm.passes.cancel import apply_cancel
from flashnorm.sites import centering
from flashnorm.sites.audit import audit
from flashnorm.sites.cancelling import Cancellation, Kept, audit_cancellation
from flashnorm.sites.centering import audit_centering
from flashnorm.sites.transforms import audit_fully
from tests import zoo
from tests.zoo.known import known


class Two(nn.Module):
    """Two norms: linears read the first, a linear and an activation the second."""

    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(8, eps=1e-5), nn.RMSNorm(8, eps=1e-5)
        self.a, self.b, self.c = (nn.Linear(8, 8, bias=i == 1) for i in range(3))

    def forward(self, x):
        h, k = self.n1(x), self.n2(x)
        return torch.tanh(self.a(h)) * self.b(h) + self.c(k) + torch.tanh(k)


@torch.no_grad()
@pytest.mark.parametrize(("norm", "readers", "word"), [("n1", ("a",), "yes"), ("n2", ("c",), "no")])
def test_what_is_deferrable_can_be_deferred_and_what_is_not_cannot(norm, readers, word):
    """The norm divides by nothing, and the products are divided instead, before their bias is added."""
    torch.manual_seed(0)
    model, x = Two().double(), torch.randn(2, 5, 8, dtype=torch.float64)
    full = audit_fully(model, inputs={"x": x})
    assert full.transforms[norm].defer.word == word
    before = model(x)
    every = torch.ones(8, dtype=torch.bool)
    kept = [Kept(reader, every, "") for reader in readers]
    if norm == "n1":  # its bias is added behind the division
        bias, model.b.bias = model.b.bias, None
        kept.append(Kept("b", every, ""))
    apply_cancel(model, [Cancellation(norm, "partial", "", kept=tuple(kept))], full.cancellation)
    if norm == "n1":
        model.b.register_forward_hook(lambda module, args, output: output + bias)
    error = (model(x) - before).abs().max() / before.abs().max()
    assert (error < 1e-13) if word == "yes" else (error > 1e-2)


def _built(model_type):
    return zoo.tiny_model("causal", known("causal", model_type))


@pytest.mark.parametrize("model_type", ["olmo2", "gpt_neox"])
def test_the_verdicts_are_those_of_each_audit(model_type):
    model = _built(model_type)
    full = audit_fully(model)
    assert [site.norm for site in audit(model).sites] == list(full.transforms)
    for site in full.report.sites:
        assert (full.transforms[site.norm].fold.word == "yes") == site.foldable
    for found in audit_cancellation(model).cancellations:
        assert full.transforms[found.norm].cancel.word == {"full": "yes"}.get(found.verdict, found.verdict)
    for found in audit_centering(model).centerings:
        assert (full.transforms[found.norm].center.word == "yes") == found.centerable
    for transforms in full.transforms.values():
        for verdict in (transforms.fold, transforms.defer, transforms.cancel, transforms.center):
            assert bool(verdict.reason) == (verdict.word != "yes")


def test_the_known_verdicts_of_deferral():
    llama = audit_fully(_built("llama")).transforms
    assert {t.defer.word for t in llama.values()} == {"yes"}
    neox = audit_fully(_built("gpt_neox")).transforms
    assert neox["gpt_neox.layers.0.input_layernorm"].defer.word == "centered"
    assert "lm_head.weight has none" in neox["gpt_neox.final_layer_norm"].defer.reason
    olmo2 = audit_fully(_built("olmo2")).transforms
    assert olmo2["model.norm"].defer.word == "yes"
    assert "before any linear layer" in olmo2["model.layers.0.post_attention_layernorm"].defer.reason


@pytest.mark.parametrize(("model_type", "runs"), [("llama", 0), ("gpt_neox", 1)])
def test_writers_are_followed_only_where_a_norm_subtracts_a_mean(model_type, runs, monkeypatch):
    followed = []
    follow = centering.trace_writers
    monkeypatch.setattr(centering, "trace_writers", lambda *args: followed.append(1) or follow(*args))
    found = audit_fully(_built(model_type))
    assert len(followed) == runs
    reasons = {transforms.center.reason for transforms in found.transforms.values()}
    assert ("it subtracts no mean" in reasons) == (runs == 0)
