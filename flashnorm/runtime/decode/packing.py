"""Projections that share an input as one matrix, without a second copy of their weights.

The model's parameters become views of the joined matrix, so that the model goes on computing, training aside, from the
same memory. `Packing.undo` gives every parameter memory of its own again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from flashnorm.errors import Unsupported
from flashnorm.runtime.decode.spec import Linear, Spec


@dataclass(frozen=True)
class PackedLayer:
    """q, k and v as rows of one linear; gate and up, gate first, or the only one of a plain MLP."""

    qkv: Linear
    up: Linear


@dataclass(frozen=True)
class Packing:
    """The joined weights of all layers, and which parameters lie in them because of it."""

    layers: tuple[PackedLayer, ...]
    moved: tuple[nn.Parameter, ...] = field(repr=False)

    def undo(self) -> None:
        """Give every moved parameter its own memory again, with the same values."""
        for parameter in self.moved:
            parameter.data = parameter.data.clone()


@torch.no_grad()
def pack(spec: Spec) -> Packing:
    """Join what shares an input, layer by layer, at the cost of one layer's weights at a time.

    Raises `Unsupported` where a fused weight of the model holds its parts in an order of its own.
    """
    moved: list[nn.Parameter] = []
    layers = []
    for layer in spec.layers:
        a, m = layer.attention, layer.mlp
        qkv = _join((a.q, a.k, a.v), moved)
        layers.append(PackedLayer(qkv, m.up if m.gate is None else _join((m.gate, m.up), moved)))
    if moved and spec.device.type == "cuda":
        torch.cuda.synchronize(spec.device)  # kernels read weights before they wait for the kernel in front
    return Packing(tuple(layers), tuple(moved))


def _join(parts: tuple[Linear, ...], moved: list[nn.Parameter]) -> Linear:
    weights = [part.weight for part in parts]
    joined = _adjacent(weights)
    if joined is None:
        if not all(isinstance(weight, nn.Parameter) for weight in weights):
            raise Unsupported("a fused projection holds its parts in an order of its own")
        joined = torch.cat([weight.detach() for weight in weights])
        for weight, rows in zip(weights, joined.split([len(w) for w in weights]), strict=True):
            weight.data = rows
            moved.append(weight)  # type: ignore[arg-type]
    return Linear(joined, _joined_bias(parts))


def _adjacent(weights: list[Tensor]) -> Tensor | None:
    """The one matrix whose rows the weights are, where they follow each other in memory."""
    first = weights[0]
    at = first.data_ptr()
    for weight in weights:
        alike = weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (alike and weight.is_contiguous() and weight.data_ptr() == at):
            return None
        at += weight.numel() * weight.element_size()
    return first.detach().as_strided((sum(map(len, weights)), first.shape[1]), (first.shape[1], 1))


def _joined_bias(parts: tuple[Linear, ...]) -> Tensor | None:
    """A copy: biases are small, and where only some parts have one the others' are zero."""
    if all(part.bias is None for part in parts):
        return None
    return torch.cat([part.weight.new_zeros(part.rows) if part.bias is None else part.bias.detach() for part in parts])
