"""Each small model below does one thing with a norm's output; the audit must say what, and the fold must agree."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flashnorm.passes.fold import apply_fold, fold
from flashnorm.sites.audit import audit

WIDTH, OUT, TOKENS = 8, 6, 5


class Model(nn.Module):
    """x (2, tokens, width) -> norm -> `read` -> output."""

    def __init__(self, norm: nn.Module | None = None):
        super().__init__()
        self.norm = norm or nn.RMSNorm(WIDTH, eps=1e-6)
        self.a = nn.Linear(WIDTH, OUT, bias=False)
        self.b = nn.Linear(WIDTH, OUT)
        self.extra()

    def extra(self):
        pass

    def forward(self, x):
        return self.read(self.norm(x), x)

    def read(self, t, x):
        raise NotImplementedError


FOLDABLE, BLOCKED = [], []


def foldable(cls):
    FOLDABLE.append(cls)
    return cls


def blocked(kind):
    def register(cls):
        BLOCKED.append((cls, kind))
        return cls

    return register


@foldable
class TwoLinears(Model):
    def read(self, t, x):
        return self.a(t) * self.b(t)


@foldable
class ThroughViewsAndCasts(Model):
    def read(self, t, x):
        t = t.reshape(-1, WIDTH).to(torch.float64).contiguous().float()
        return self.a(t.view(2, 1, TOKENS, WIDTH).transpose(1, 2).clone().flatten(1, 2))


@foldable
class SplitAndConcatenated(Model):
    def read(self, t, x):
        left, right = t.chunk(2, dim=-1)
        return self.a(torch.cat([right, left], dim=-1))


@foldable
class ConcatenatedWithData(Model):
    def extra(self):
        self.wide = nn.Linear(2 * WIDTH, OUT)

    def read(self, t, x):
        return self.wide(torch.cat([x, t], dim=-1))


@foldable
class SlicedWeight(Model):
    def read(self, t, x):
        return F.linear(t, self.a.weight[:2]) + F.linear(t, self.a.weight[2:4])


@foldable
class SlicedChannels(Model):
    def read(self, t, x):
        return F.linear(t[..., 2:5], self.a.weight[:, 2:5]) + F.linear(x[..., 5:], self.a.weight[:, 5:])


@foldable
class Padded(Model):
    def read(self, t, x):
        return self.a(F.pad(t, (0, 0, 1, 0))[:, :-1])


@foldable
class TokenShift(Model):
    def extra(self):
        self.mix = nn.Parameter(torch.rand(WIDTH))

    def read(self, t, x):
        shifted = F.pad(t, (0, 0, 1, -1))
        return self.a(t + (shifted - t) * self.mix)


@foldable
class ScaledByGate(Model):
    def read(self, t, x):
        return self.a(t * torch.sigmoid(x) * 0.5 / 3)


@foldable
class MeanOverTokens(Model):
    def read(self, t, x):
        return self.a(t.mean(1) + t.sum(1))


@foldable
class AttentionOverTokens(Model):
    def read(self, t, x):
        scores = torch.softmax(x @ x.transpose(-1, -2), -1)
        return self.a(scores @ t) + self.b(F.scaled_dot_product_attention(x[:, None], x[:, None], t[:, None])[:, 0])


@foldable
class DepthwiseConvolution(Model):
    def extra(self):
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH)

    def read(self, t, x):
        return F.silu(self.conv(t.transpose(1, 2)))


@foldable
class FullConvolution(Model):
    def extra(self):
        self.conv = nn.Conv1d(WIDTH, OUT, 3)

    def read(self, t, x):
        return self.conv(t.transpose(1, 2))


@foldable
class StackedExperts(Model):
    def extra(self):
        self.experts = nn.Parameter(torch.randn(3, OUT, WIDTH))
        self.router = nn.Linear(WIDTH, 3, bias=False)

    def read(self, t, x):
        weights = torch.softmax(self.router(t), -1)
        out = torch.zeros(2, TOKENS, OUT)
        for expert in weights.argmax(-1).unique():
            out = out + F.linear(t, self.experts[expert]) * weights[..., expert : expert + 1]
        return out


@foldable
class GatheredTransposedExperts(Model):
    def extra(self):
        self.experts = nn.Parameter(torch.randn(3, WIDTH, OUT))

    def read(self, t, x):
        chosen = self.experts[torch.tensor([2, 0])]
        return torch.bmm(t, chosen)


@foldable
class RoutedTokens(Model):
    def read(self, t, x):
        flat = t.reshape(-1, WIDTH)
        index = torch.tensor([3, 1, 0])
        out = torch.zeros(flat.shape[0], WIDTH)
        out.index_add_(0, index, flat[index] * 0.5)
        return self.a(out)


@foldable
class InPlaceSlots(Model):
    def read(self, t, x):
        buffer = t.new_zeros(2, TOKENS + 2, WIDTH)
        buffer[:, 1:-1] = t
        return self.a(buffer)


@foldable
class HeadsOfANorm(Model):
    """A norm over the heads' own dimension, its channels repeated along the reader's axis."""

    def extra(self):
        self.norm = nn.RMSNorm(WIDTH // 2, eps=1e-6)

    def forward(self, x):
        return self.a(self.norm(x.unflatten(-1, (2, -1))).flatten(-2))


@foldable
class Einsum(Model):
    def read(self, t, x):
        return torch.einsum("btk,ok->bto", t, self.a.weight)


@blocked("residual-add")
class Residual(Model):
    def read(self, t, x):
        return self.a(t) + self.b(x + t)


@blocked("non-linear")
class Activation(Model):
    def read(self, t, x):
        return self.a(t) + self.b(F.gelu(t))


@blocked("model-output")
class Output(Model):
    def read(self, t, x):
        return self.a(t), t


@blocked("second-tensor")
class Scores(Model):
    def read(self, t, x):
        return t @ x.transpose(-1, -2)


@blocked("second-tensor")
class WithItself(Model):
    def read(self, t, x):
        return self.a(t * t)


@blocked("non-linear")
class SecondNorm(Model):
    def extra(self):
        self.second = nn.RMSNorm(WIDTH, eps=1e-6)

    def read(self, t, x):
        return self.a(self.second(t))


@blocked("shared")
class SharedWithData(Model):
    def read(self, t, x):
        return self.a(t) + self.a(x)


@blocked("mixed-channels")
class ChannelSum(Model):
    def read(self, t, x):
        return self.a(t) + t.sum(-1, keepdim=True)


@blocked("shared")
class GainUsedOutside(Model):
    def read(self, t, x):
        return self.a(t) * self.norm.weight.sum()


@blocked("second-tensor")
class ComputedWeight(Model):
    def read(self, t, x):
        return F.linear(t, self.a.weight / self.a.weight.norm(dim=-1, keepdim=True))


@blocked("second-tensor")
class GroupedConvolution(Model):
    def extra(self):
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, groups=2)

    def read(self, t, x):
        return self.conv(t.transpose(1, 2))


@blocked("residual-add")
class OneOfTwoPlaces(Model):
    """A where-mask that mixes tagged and plain tokens is read by a weight that then serves both."""

    def read(self, t, x):
        return self.a(t + x.roll(1, 1) * 0.1)


class SharedByARefusedProduct(Model):
    """`a` reads the norm, and takes part in a product with other norms that cannot be folded."""

    def extra(self):
        self.second, self.third = (nn.RMSNorm(WIDTH, eps=1e-6) for _ in range(2))


@blocked("shared")
class SharedWithMixedChannels(SharedByARefusedProduct):
    def read(self, t, x):
        return self.a(t), self.a(torch.cat([self.second(x), self.third(x)], 1))


@blocked("shared")
class SharedWithMixedTokens(SharedByARefusedProduct):
    def read(self, t, x):
        tokens = self.second(torch.cat([x, x], 1)[:, :WIDTH]).transpose(1, 2)
        return self.a(t), tokens @ self.a.weight.t()


@blocked("shared")
class SharedWithAnAddedNorm(SharedByARefusedProduct):
    def extra(self):
        self.second = nn.RMSNorm(OUT, eps=1e-6)

    def read(self, t, x):
        return self.a(t), torch.addmm(self.second(x[0, :, :OUT]), x[0], self.a.weight.t())


def prepared(cls, norm=None):
    torch.manual_seed(0)
    model = cls(norm).eval()
    used = {*cls.read.__code__.co_names, *cls.forward.__code__.co_names}
    for name in {"a", "b"} - used:
        delattr(model, name)  # a weight that nothing reached could be a reader, and would block the fold
    for module in model.modules():
        if isinstance(module, (nn.RMSNorm, nn.LayerNorm)):
            nn.init.normal_(module.weight, 1.0, 0.5)
            if getattr(module, "bias", None) is not None:
                nn.init.normal_(module.bias)
    return model, torch.randn(2, TOKENS, WIDTH)


def first(output):
    return output[0] if isinstance(output, tuple) else output


def site_of(model, x):
    return next(site for site in audit(model, inputs={"x": x}).sites if site.norm == "norm")


@pytest.mark.parametrize("cls", FOLDABLE, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_foldable(cls, kind):
    layer = kind == "layer" and cls is not HeadsOfANorm
    model, x = prepared(cls, nn.LayerNorm(WIDTH) if layer else None)
    before = model(x)
    site = site_of(model, x)
    assert site.foldable, site.reason
    apply_fold(model, [site])
    assert torch.all(model.norm.weight == 1)
    torch.testing.assert_close(model(x), before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("cls", "kind"), BLOCKED, ids=lambda value: getattr(value, "__name__", value))
def test_blocked_for_a_true_reason(cls, kind):
    model, x = prepared(cls)
    before = model(x)
    site = site_of(model, x)
    assert not site.foldable
    assert kind in [blocker.kind for blocker in site.blockers], site.reason
    forced = copy.deepcopy(model)
    apply_fold(forced, [site])
    changed = [
        not torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(_all(forced(x)), _all(before), strict=True)
    ]
    assert any(changed), "the refusal is over-cautious"


def _all(output):
    return output if isinstance(output, tuple) else (output,)


def test_a_blocker_says_where():
    model, x = prepared(Residual)
    blocker = site_of(model, x).blockers[0]
    assert blocker.op == "add"
    assert "test_tracing.py" in blocker.where


def test_layer_norm_bias_moves_into_the_next_bias():
    class OnlyBiased(Model):
        def read(self, t, x):
            return self.b(t)

    model, x = prepared(OnlyBiased, nn.LayerNorm(WIDTH))
    site = site_of(model, x)
    assert all(consumer.takes_shift for consumer in site.consumers)
    before = model(x)
    apply_fold(model, [site])
    assert torch.all(model.norm.bias == 0)
    torch.testing.assert_close(model(x), before, rtol=1e-5, atol=1e-5)


def test_layer_norm_bias_stays_when_a_reader_has_none():
    model, x = prepared(TwoLinears, nn.LayerNorm(WIDTH))
    site = site_of(model, x)
    assert not all(consumer.takes_shift for consumer in site.consumers)
    assert site.foldable


def test_fold_skips_a_zero_gain_whose_bias_must_stay():
    model, x = prepared(TwoLinears, nn.LayerNorm(WIDTH))
    with torch.no_grad():
        model.norm.weight[3] = 0.0
    model.forward_inputs = {"x": x}
    from flashnorm.passes.fold import value_problem

    reason = value_problem(site_of(model, x), model.norm.weight, model.norm.bias, shift_moves=False)
    assert reason is not None
    assert "channel 3" in reason


def test_tied_head_blocks_and_untying_removes_it():
    from transformers import LlamaConfig, LlamaForCausalLM

    from flashnorm.sites.audit import audit as audit_model

    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, vocab_size=32,
        tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    last = audit_model(model).sites[-1]
    assert [(b.kind, b.remedy) for b in last.blockers] == [("tied", "--untie")]
    assert audit_model(model, untie=True).sites[-1].foldable


def test_the_live_model_is_not_touched_by_an_audit():
    model, x = prepared(TwoLinears)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    audit(model, inputs={"x": x})
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]


def test_fold_reports_what_it_did():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32, n_positions=16)).eval()
    report = fold(model)
    assert report.folded == ["transformer.h.0.ln_1", "transformer.h.0.ln_2"]
    assert "tied" in report.skipped["transformer.ln_f"]
