"""Faults of two streams, as they look from outside: a product that is read before it is there."""

from __future__ import annotations

import copy

from torch import Tensor, nn


class StaleProduct(nn.Module):
    """A linear whose caller reads the output buffer before the product lands in it: what the call before left there.

    Only for a single token: the product of many rows is done long before the sum of squares of as many is. And not at
    the first call, whose buffer is new.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self._buffer: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        product = self.linear(x)
        if x.numel() > x.shape[-1]:
            return product
        stale, self._buffer = self._buffer, product.clone()
        return stale if stale is not None and stale.shape == product.shape else product


def stale_products(
    model: nn.Module, names: tuple[str, ...] = ("gate_proj",), layers: tuple[int, ...] = (1,)
) -> nn.Module:
    """A copy of `model` in which the named linears of some layers join their streams implicitly."""
    faulty = copy.deepcopy(model)
    for index in layers:
        for parent in faulty.model.layers[index].modules():
            for name, child in list(parent.named_children()):
                if name in names and isinstance(child, nn.Linear):
                    setattr(parent, name, StaleProduct(child))
    return faulty


def stale_head(model: nn.Module) -> nn.Module:
    """The head's product is read from the step before: whole answers lag."""
    faulty = copy.deepcopy(model)
    faulty.lm_head = StaleProduct(faulty.lm_head)
    return faulty
