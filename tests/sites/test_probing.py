from __future__ import annotations

import pytest
import torch
from torch import nn

from flashnorm.sites.probing import is_candidate, probe

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


def test_a_dynamic_tanh_is_taken_for_what_it_is():
    convention = found(DynamicTanh()).convention
    assert convention.saturates
    assert (convention.kind, convention.offset, convention.has_bias, convention.group_size) == ("DyT", 0.0, False, 1)


def test_modules_with_matrices_are_no_candidates():
    assert not is_candidate(nn.TransformerEncoderLayer(WIDTH, 2))
    assert not is_candidate(nn.Conv1d(WIDTH, WIDTH, 3))
    assert is_candidate(nn.LayerNorm(WIDTH))


def test_a_parameter_without_values_is_no_gain():
    with torch.device("meta"):
        assert not is_candidate(nn.Embedding(1000, WIDTH))
    assert is_candidate(nn.LayerNorm(WIDTH))


def test_a_buffer_without_values_is_nothing_to_experiment_with():
    """As the positions of a sinusoidal embedding, which a model has no parameters for."""
    norm = nn.RMSNorm(WIDTH)
    norm.register_buffer("table", torch.zeros(3))
    assert is_candidate(norm)
    norm.register_buffer("table", torch.empty(1000, WIDTH, device="meta"))
    assert not is_candidate(norm)


def test_the_module_itself_is_not_changed():
    module = Norm(bias=True)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    found(module)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


class Irregular(Norm):
    """A norm whose gain is another one depending on `plus(module, x)`, which is added to it."""

    def __init__(self, plus):
        super().__init__()
        self.plus, self.count = plus, 0
        self.register_buffer("positions", torch.linspace(0, 1, 100)[:, None])

    def forward(self, x):
        self.count += 1
        return super().forward(x) * (1 + self.plus(self, x)) if x.ndim else x


IRREGULAR = {
    "alternates": (lambda norm, x: norm.count % 2, "call to call"),
    "first call": (lambda norm, x: norm.count == 1, "call to call"),
    "by position": (lambda norm, x: norm.positions[: x.shape[-2]], "position"),
    "by length": (lambda norm, x: x.shape[-2] > 1, "position"),
    "over positions": (lambda norm, x: x.var(-2, keepdim=True, correction=0), "position"),
}


@pytest.mark.parametrize(("plus", "reason"), IRREGULAR.values(), ids=IRREGULAR)
def test_a_norm_that_does_not_always_do_the_same_says_so(plus, reason):
    result = found(Irregular(plus))
    assert result.weight == "weight"
    assert reason in result.irregular


def test_a_module_that_draws_random_numbers_is_no_norm():
    assert found(Irregular(lambda norm, x: torch.rand(()))) is None


def test_one_that_does_only_counts_is_regular():
    assert found(Irregular(lambda norm, x: 0)).irregular is None


@pytest.mark.parametrize("shape", [(WIDTH,), (1, WIDTH), (2, 3, WIDTH), (0, 3, WIDTH), (2, 1, WIDTH)])
def test_norms_are_regular_for_calls_of_every_shape(shape):
    for module in (Norm(), Norm(group=8), Norm(mean=True, bias=True), nn.LayerNorm(WIDTH)):
        assert probe(module, (torch.randn(shape),), {}).irregular is None


def test_a_norm_that_takes_one_position_only_says_so():
    class Single(Norm):
        def forward(self, x):
            assert x.shape[:-1].numel() == 1
            return super().forward(x)

    assert "could not be tried" in found(Single()).irregular


def test_a_norm_that_works_in_place_is_found():
    class InPlace(nn.RMSNorm):
        def forward(self, x):
            x.mul_(torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).mul_(self.weight)
            return x

    result = found(InPlace(WIDTH))
    assert result.irregular is None
    assert result.convention.eps == pytest.approx(1e-6, rel=1e-3)


@pytest.mark.parametrize(("persistent", "used"), [(True, True), (True, False), (False, True)])
def test_an_offset_that_a_checkpoint_may_change_is_no_convention(persistent, used):
    class Buffered(Norm):
        def __init__(self):
            super().__init__()
            self.register_buffer("plus", torch.ones(()), persistent=persistent)

        def forward(self, x):
            core = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
            return core * (self.weight + self.plus) if used else core * self.weight

    result = found(Buffered())
    assert result.convention.offset == float(used)
    assert (result.irregular == "its gain also depends on the buffer plus") == (persistent and used)
