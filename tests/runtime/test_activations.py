"""Activations are told by numbers, in whatever way the module spells them."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN

from flashnorm.runtime.activations import find_activation
from tests.runtime.small import WIDTH, GatedBlock


def found(block, swapped=False):
    order = (block.first, block.second) if swapped else (block.second, block.first)
    x = torch.randn(2, 3, WIDTH, dtype=block.last.weight.dtype)
    with torch.no_grad():
        return find_activation(block, order, block.last, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("activation", "name"),
    [
        (F.silu, "silu"),
        (lambda t: t * torch.sigmoid(t), "silu"),
        (ACT2FN["gelu_pytorch_tanh"], "gelu_tanh"),
        (ACT2FN["gelu_new"], "gelu_tanh"),
        (F.relu, "relu"),
        (lambda t: t.clamp(min=0), "relu"),
        (F.gelu, None),
        (lambda t: 2 * F.silu(t), None),
        (lambda t: F.silu(1.001 * t), None),
        (lambda t: F.relu(t) ** 2, None),
        (lambda t: t / (1 + math.e ** (-1.702 * t)), None),
    ],
)
def test_an_activation_is_what_it_computes(activation, name, dtype):
    assert found(GatedBlock(activation).to(dtype)) == name


def test_gate_and_up_are_not_confused():
    assert found(GatedBlock(F.silu), swapped=True) is None


class Packed(nn.Module):
    """Gate and up in one projection; `flipped`: up first."""

    def __init__(self, flipped: bool, cast: torch.dtype = torch.float64):
        super().__init__()
        self.both, self.last = nn.Linear(WIDTH, 48, bias=False), nn.Linear(24, WIDTH, bias=False)
        self.flipped, self.cast = flipped, cast

    def forward(self, x):
        gate, up = self.both(x).chunk(2, -1)[:: -1 if self.flipped else 1]
        return self.last((F.silu(gate) * up).to(self.cast))


@pytest.mark.parametrize(("flipped", "name"), [(False, "silu"), (True, None)])
def test_one_projection_holds_gate_and_then_up(flipped, name):
    block = Packed(flipped)
    with torch.no_grad():
        assert find_activation(block, (block.both,), block.last, torch.randn(2, WIDTH)) == name


def test_a_last_cast_is_allowed_for():
    block = Packed(False, torch.bfloat16)
    with torch.no_grad():
        assert find_activation(block, (block.both,), block.last, torch.randn(2, WIDTH)) == "silu"


def test_an_mlp_that_does_something_else_between_is_none_and_keeps_no_hooks():
    class Clamped(GatedBlock):
        def forward(self, x):
            return self.last((self.act(self.second(x)) * self.first(x)).clamp(max=4.0))

    block = Clamped()
    assert found(block) is None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in block.modules())
