"""Faults of numbers and of translation: a product that overflows, an adapter that knows nothing of the fold."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from tests.verify.tiny import folded, gain_of, pairs


class HalfProduct(nn.Module):
    """A deferred linear whose product stays in fp16 until it is scaled."""

    def __init__(self, linear: nn.Linear, eps: float) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = linear.weight, linear.bias, eps

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
        product = (x.half() @ self.weight.half().T).float() * scale
        return (product if self.bias is None else product + self.bias).to(x.dtype)


def product_in_half(model: nn.Module) -> nn.Module:
    """A fold whose gate and up projections of every layer defer the scale in fp16."""
    faulty = folded(model)
    for layer in faulty.model.layers:
        eps = layer.post_attention_layernorm.variance_epsilon
        layer.post_attention_layernorm = nn.Identity()
        for name in ("gate_proj", "up_proj"):
            setattr(layer.mlp, name, HalfProduct(getattr(layer.mlp, name), eps))
    return faulty


def large_stream(model: nn.Module) -> nn.Module:
    """`model` with a residual stream far from one, as trained models have it at a few tokens."""
    model.model.embed_tokens.weight.data *= 2.0**16
    for layer in model.model.layers:
        layer.mlp.gate_proj.weight.data *= 4
    return model


def with_adapter(model: nn.Module) -> nn.Module:
    """A copy with an adapter of rank two merged into one query projection."""
    adapted = copy.deepcopy(model)
    _merge(adapted, None)
    return adapted


def untranslated_adapter(model: nn.Module) -> nn.Module:
    """`model` has the adapter; here the fold was made without it, and the adapter was merged as it is."""
    base = copy.deepcopy(model)
    _merge(base, None, sign=-1)
    faulty = folded(base)
    _merge(faulty, None)
    return faulty


def translated_adapter(model: nn.Module) -> nn.Module:
    """The same done right: the adapter's A is multiplied by the gain."""
    base = copy.deepcopy(model)
    _merge(base, None, sign=-1)
    faulty = folded(base)
    norm = next(iter(pairs(base)))[0]
    _merge(faulty, gain_of(base, norm))
    return faulty


def _merge(model: nn.Module, gain: Tensor | None, sign: int = 1) -> None:
    weight = model.model.layers[0].self_attn.q_proj.weight
    generator = torch.Generator().manual_seed(3)
    b, a = (torch.randn(shape, generator=generator) for shape in ((weight.shape[0], 2), (2, weight.shape[1])))
    update = (b @ a).double() * 0.3 * weight.double().std()
    weight.data = (weight.double() + sign * (update if gain is None else update * gain)).to(weight.dtype)
