from __future__ import annotations

import pytest
import torch
from torch import nn

from flashnorm.sites.probing import ProbeCache, is_candidate, probe

WIDTH = 24


class Norm(nn.Module):
    """A norm with every part of its convention adjustable."""

    def __init__(
        self, eps=1e-5, offset=0.0, placement="inside_sqrt", before=False, mean=False, bias=False, group=WIDTH
    ):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.bias = nn.Parameter(torch.randn(WIDTH)) if bias else None
        self.eps, self.offset, self.placement, self.before = eps, offset, placement, before
        self.mean, self.group = mean, group

    def forward(self, x):
        dtype = x.dtype
        wide = x.float().unflatten(-1, (-1, self.group))
        if self.mean:
            wide = wide - wide.mean(-1, keepdim=True)
        square = wide.pow(2).mean(-1, keepdim=True)
        bottom = {
            "inside_sqrt": lambda: (square + self.eps).sqrt(),
            "outside_sqrt": lambda: square.sqrt() + self.eps,
            "clamp": lambda: square.sqrt().clamp(min=self.eps),
            "none": lambda: square.sqrt(),
        }[self.placement]()
        core = (wide / bottom).flatten(-2)
        out = (core * (self.offset + self.weight.float())).to(dtype) if self.before else None
        out = core.to(dtype) * (self.offset + self.weight) if out is None else out
        return out if self.bias is None else out + self.bias


class Gated(nn.Module):
    def __init__(self, gate_first: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.gate_first = gate_first

    def forward(self, x, gate):
        gate = nn.functional.silu(gate)
        x = x * gate if self.gate_first else x
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        return x if self.gate_first else x * gate


def found(module, *extra):
    return probe(module, (torch.randn(2, 3, WIDTH), *extra), {})


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("placement", ["inside_sqrt", "outside_sqrt", "clamp", "none"])
@pytest.mark.parametrize("before", [False, True])
def test_convention_is_read_off_the_computation(offset, placement, before):
    convention = found(Norm(eps=3e-4, offset=offset, placement=placement, before=before)).convention
    assert convention.offset == offset
    assert convention.identity == 1.0 - offset
    assert convention.eps_placement == placement
    assert convention.eps == (0.0 if placement == "none" else pytest.approx(3e-4, rel=1e-3))
    assert convention.multiply == ("before_cast" if before else "after_cast")
    assert not convention.subtracts_mean
    assert not convention.has_bias
    assert convention.group_size == WIDTH


@pytest.mark.parametrize("eps", [1e-3, 1e-5, 1e-6, 1e-8, 1e-12])
def test_epsilon_of_any_size(eps):
    assert found(Norm(eps=eps)).convention.eps == pytest.approx(eps, rel=1e-3)


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_mean_and_bias(mean, bias):
    result = found(Norm(mean=mean, bias=bias))
    assert result.convention.subtracts_mean == mean
    assert result.convention.has_bias == bias
    assert result.bias == ("bias" if bias else None)
    assert result.weight == "weight"


@pytest.mark.parametrize("group", [4, 8, WIDTH])
def test_groups_that_share_one_rms(group):
    assert found(Norm(group=group)).convention.group_size == group


@pytest.mark.parametrize("gate_first", [False, True])
def test_gated_norms(gate_first):
    convention = found(Gated(gate_first), torch.randn(2, 3, WIDTH)).convention
    assert convention.gated
    assert convention.eps == pytest.approx(1e-6, rel=1e-2)


def test_the_values_of_the_weights_do_not_matter():
    for value in (0.0, 1.0, -3.0, 300.0):
        module = Norm(offset=1.0)
        nn.init.constant_(module.weight, value)
        assert found(module).convention.offset == 1.0


def test_stock_torch_norms():
    assert found(nn.LayerNorm(WIDTH)).convention.subtracts_mean
    assert found(nn.LayerNorm(WIDTH, bias=False)).bias is None
    assert found(nn.RMSNorm(WIDTH, eps=1e-6)).convention.eps == pytest.approx(1e-6, rel=1e-3)
    # Without an epsilon of its own it takes that of float32, the dtype it computes in.
    assert found(nn.RMSNorm(WIDTH)).convention.eps == pytest.approx(torch.finfo(torch.float32).eps, rel=1e-2)


class LayerScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return x * self.weight


class DynamicTanh(LayerScale):
    def forward(self, x):
        return torch.tanh(0.5 * x) * self.weight


class Sign(LayerScale):
    def forward(self, x):
        return x.sign() * self.weight


class SquaredGain(LayerScale):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)) * self.weight**2


class AbsoluteGain(LayerScale):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)) * self.weight.abs()


class ClampedGain(LayerScale):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)) * self.weight.clamp(min=0)


@pytest.mark.parametrize(
    "module",
    [
        AbsoluteGain(),
        ClampedGain(),
        LayerScale(),
        DynamicTanh(),
        Sign(),
        SquaredGain(),
        nn.GELU(),
        nn.Tanh(),
        nn.Softmax(-1),
        nn.Identity(),
        nn.Dropout(),
    ],
    ids=lambda module: type(module).__name__,
)
def test_what_is_not_a_norm_is_not_taken_for_one(module):
    assert found(module) is None


def test_modules_with_matrices_are_no_candidates():
    assert not is_candidate(nn.TransformerEncoderLayer(WIDTH, 2))
    assert not is_candidate(nn.Conv1d(WIDTH, WIDTH, 3))
    assert is_candidate(nn.LayerNorm(WIDTH))


def test_a_parameter_without_values_is_no_gain():
    with torch.device("meta"):
        assert not is_candidate(nn.Embedding(1000, WIDTH))
    assert is_candidate(nn.LayerNorm(WIDTH))


def test_the_module_itself_is_not_changed():
    module = Norm(bias=True)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    found(module)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


def test_the_cache_tells_layers_with_different_settings_apart():
    cache = ProbeCache()
    call = ((torch.randn(2, WIDTH),), {})
    assert cache.probe(Norm(eps=1e-5), *call).convention.eps == pytest.approx(1e-5, rel=1e-3)
    assert cache.probe(Norm(eps=1e-3), *call).convention.eps == pytest.approx(1e-3, rel=1e-3)


class Private(nn.Module):
    """A norm whose offset hides where a cache might not look."""

    def __init__(self, **settings):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))
        vars(self).update(settings)

    def offset(self):
        held = vars(self)
        return held.get("_plus", 0.0) + held.get("pair", (0.0, 0.0))[1] + getattr(held.get("config"), "plus", 0.0)

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (self.offset() + self.weight)


class Config:
    def __init__(self, plus):
        self.plus = plus

    def __repr__(self):
        return "Config"


@pytest.mark.parametrize(
    "settings", [lambda v: {"_plus": v}, lambda v: {"pair": (1, v)}, lambda v: {"config": Config(v)}]
)
def test_the_cache_tells_settings_apart_wherever_they_are_kept(settings):
    cache, call = ProbeCache(), ((torch.randn(2, WIDTH),), {})
    assert [cache.probe(Private(**settings(value)), *call).convention.offset for value in (0.0, 1.0)] == [0.0, 1.0]


def test_the_cache_runs_one_experiment_for_equal_norms(monkeypatch):
    from flashnorm.sites import probing

    runs = []
    monkeypatch.setattr(probing, "probe", lambda module, *_: runs.append(module))
    cache = ProbeCache()
    for module in (Norm(), Norm(), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)):
        cache.probe(module, (torch.randn(2, WIDTH),), {})
    assert len(runs) == 2
