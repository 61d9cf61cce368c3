"""The stand-ins alone: what they compute, hold and refuse."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flashnorm.errors import GradientError
from flashnorm.kernels.bounds import exceeds, expected_rms_linear
from flashnorm.runtime.merging import Group
from flashnorm.runtime.modules import DeferredLinear, DeferredNorm, GatedMLP
from tests.runtime.small import WIDTH, GatedBlock, Norm

EPS = 1e-5


def stand_ins(sizes=(16, 8), bias=True):
    torch.manual_seed(0)
    original = Norm()
    nn.init.normal_(original.weight, 0.7, 0.3)
    norm = DeferredNorm(original.eval())
    linears = [DeferredLinear(nn.Linear(WIDTH, size, bias=bias)) for size in sizes]
    group = Group(norm, "weight", 0.0, EPS, linears)
    for part, linear in enumerate(linears):
        linear.join(group, part)
    norm.groups = (group,)
    group.gather()
    return norm, linears


def x(*shape):
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(1))


def right(norm, linear, given, out):
    bias = None if linear.bias is None else linear.bias
    expected = expected_rms_linear(given.reshape(-1, WIDTH), linear.weight, EPS, norm.weight, bias)
    return exceeds(out.reshape(-1, out.shape[-1]), expected) <= 1


@torch.no_grad()
def test_readers_take_norm_and_linear_from_what_the_norm_hands_on():
    norm, linears = stand_ins()
    given = x(2, 5)
    handed = norm(given)
    assert torch.equal(handed, given)
    assert all(right(norm, linear, given, linear(handed)) for linear in linears)


@torch.no_grad()
def test_readers_share_a_product_of_one_tensor_and_never_of_another(monkeypatch):
    from flashnorm.runtime import modules

    calls = []
    product = modules.rms_product
    monkeypatch.setattr(modules, "rms_product", lambda *args: calls.append(0) or product(*args))
    norm, (first, second) = stand_ins()
    handed, other = norm(x(2, 5)), norm(2 + x(2, 5))
    first(handed)
    assert right(norm, second, other, second(other))  # called out of turn, with another tensor
    assert right(norm, second, handed, second(handed))
    assert len(calls) == 2
    assert right(norm, second, handed, second(handed.view(1, 10, WIDTH)))  # a view is another tensor, with equal rows
    assert len(calls) == 3


@torch.no_grad()
def test_nothing_hangs_on_the_residual_stream():
    norm, (first, _) = stand_ins()
    given = x(2, 5)
    first(norm(given))
    assert not vars(given)


@torch.no_grad()
def test_a_gated_mlp_is_norm_projections_activation_and_down():
    norm, (second, first) = stand_ins((24, 24), bias=False)
    block = GatedBlock(F.silu)
    block.second, block.first = second, first
    fused = GatedMLP(block, second.group, "last", "silu")
    given = x(2, 5)
    assert list(fused.state_dict()) == list(block.state_dict())
    expected = block(norm(given))
    assert (fused(norm(given)) - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("what", ["input", "norm", "reader"])
def test_a_wanted_gradient_is_refused(what):
    norm, (first, second) = stand_ins()
    for parameter in (*norm.parameters(), *first.parameters(), *second.parameters()):
        parameter.requires_grad_(False)
    given = x(2)
    assert norm(given) is not None
    {"input": given, "norm": norm.weight, "reader": second.bias}[what].requires_grad_(True)
    with pytest.raises(GradientError, match="no backward"):
        norm(given)
    with torch.no_grad():
        assert norm(given) is not None


@torch.no_grad()
@pytest.mark.parametrize("change", ["to", "assign", "load", "setattr", "norm"])
def test_other_memory_for_a_parameter_reaches_the_product(change):
    norm, (first, second) = stand_ins()
    new = torch.randn(8, WIDTH)
    if change == "to":
        for module in (norm, first, second):
            module.to(torch.float64)
    elif change == "norm":
        norm.load_state_dict({"weight": torch.ones(WIDTH)})
        assert second.group.gain is None
    elif change == "setattr":
        second.weight = nn.Parameter(new)
    else:
        second.load_state_dict({"weight": new, "bias": second.bias.clone()}, assign=change == "assign")
    given = x(2, 5).to(second.weight.dtype)
    assert right(norm, second, given, second(norm(given)))
    assert right(norm, first, given, first(norm(given)))
