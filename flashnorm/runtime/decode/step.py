"""One step of some rows against the cache, in plain torch: the way on any device, and the kernels' oracle.

A value is rounded to the model's dtype where the kernels round it: q, k and v, attention's output, the activated
product and the residual stream. In between, arithmetic is in fp32.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from flashnorm.runtime.decode import reference
from flashnorm.runtime.decode.cache import Cache
from flashnorm.runtime.decode.spec import Attention, Mlp, Spec


class Step(Protocol):
    """Appends one token to each row's sequence and gives the logits after it.

    `slots`: (rows,); `chosen`, `lengths`: (slots,), each slot's token and how many lie in its cache before it, where
    the token's keys and values are written. All int64 on the device. Returns (rows, vocabulary) fp32.
    """

    def __call__(self, slots: Tensor, chosen: Tensor, lengths: Tensor) -> Tensor: ...


@runtime_checkable
class SettlingStep(Step, Protocol):
    """One that can also append the likeliest tokens itself."""

    def settled(self, slots: Tensor, chosen: Tensor, lengths: Tensor, following: Tensor, *, spare: int) -> Tensor:
        """The same, with chosen[slots] = following = argmax(logits) and lengths[slots] += 1.

        But 0 for the slot `spare`. `following`: (rows,) int64.
        """
        ...


class TorchStep:
    """The spec interpreted against the cache."""

    def __init__(self, spec: Spec, cache: Cache) -> None:
        self._spec, self._cache = spec, cache

    def __call__(self, slots: Tensor, chosen: Tensor, lengths: Tensor) -> Tensor:
        x = embed(self._spec, chosen[slots][:, None])
        at = lengths[slots][:, None]
        reach = int(at.max()) + 1
        for layer, keys, values in zip(self._spec.layers, self._cache.keys, self._cache.values, strict=True):
            x = self._attention(x, layer.attention, (keys, values), slots, at, reach)
            x = self._mlp(x, layer.mlp)
        return reference.logits(wide(x[:, 0]), self._spec.head).float()

    def _attention(
        self, x: Tensor, by: Attention, cache: tuple[Tensor, Tensor], slots: Tensor, at: Tensor, reach: int
    ) -> Tensor:
        q, k, v = (part.to(x.dtype) for part in reference.project(wide(x), by, at))
        for stored, new in zip(cache, (k, v), strict=True):
            stored[slots, :, at[:, 0]] = new[:, 0]
        keys, values = (stored[slots, :, :reach] for stored in cache)
        attended = reference.attend(wide(q), keys, values, by, at).to(x.dtype)
        return reference.join(wide(x), reference.linear(wide(attended), by.out), by).to(x.dtype)

    def _mlp(self, x: Tensor, by: Mlp) -> Tensor:
        inner = reference.activated(wide(x), by).to(x.dtype)
        return reference.join(wide(x), reference.linear(wide(inner), by.down), by).to(x.dtype)


def embed(spec: Spec, tokens: Tensor) -> Tensor:
    """The residual stream before the first layer, in the model's dtype. `tokens`: (...,); returns (..., hidden)."""
    rows = spec.embedding.detach()[tokens]
    return rows if spec.multiplier == 1 else (wide(rows) * spec.multiplier).to(rows.dtype)


def wide(x: Tensor) -> Tensor:
    """In the dtype of arithmetic: fp32 for half precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
