"""Faults of a norm's scalar: its epsilon, and how often the scale is applied."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from tests.verify.tiny import folded


def small_embedding(model: nn.Module) -> nn.Module:
    """`model` with activations so small, as right after many embeddings, that the first norm's epsilon matters."""
    model.model.embed_tokens.weight.data *= 1e-3
    return model


def epsilon_dropped(model: nn.Module) -> nn.Module:
    """A copy whose first norm divides by sqrt(mean(x²))."""
    faulty = copy.deepcopy(model)
    faulty.model.layers[0].input_layernorm.variance_epsilon = 0.0
    return faulty


def epsilon_scaled(model: nn.Module) -> nn.Module:
    """A fold that scales the first norm's epsilon along with its gain."""
    faulty = folded(model)
    faulty.model.layers[0].input_layernorm.variance_epsilon *= 3
    return faulty


def scale_twice(model: nn.Module) -> nn.Module:
    """A copy in which both the norm and its reader apply the scale."""
    faulty = folded(model)
    norm = faulty.model.layers[1].input_layernorm

    def again(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        wide = args[0].double()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.variance_epsilon)
        return (output.double() * scale).to(output.dtype)

    norm.register_forward_hook(again)
    return faulty
