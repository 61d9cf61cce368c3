"""Faults of decoding: an engine whose steps answer late, or whose cache holds something else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from flashnorm.verify.engines.engine import Decoding, Engine


class _Late:
    """Single tokens are answered with the step before's logits, at the steps that `late` names."""

    def __init__(self, inner: Decoding, late: Callable[[int], bool]) -> None:
        self._inner, self._late, self._count = inner, late, 0
        self._last: Tensor | None = None

    def extend(self, ids: Tensor) -> Tensor:
        logits = self._inner.extend(ids)
        before, self._last = self._last, logits[:, -1:].clone()
        self._count += ids.shape[1]
        return before if ids.shape[1] == 1 and before is not None and self._late(self._count) else logits

    def close(self) -> None:
        self._inner.close()


def answers_late(engine: Engine, late: Callable[[int], bool] = lambda count: True) -> Engine:
    """An output buffer is read one step late: always, or where `late` says so of the sequence's length."""
    begin = engine.begin
    assert begin is not None
    return replace(engine, begin=lambda rows: _Late(begin(rows), late))


def late_once(engine: Engine, position: int = 300) -> Engine:
    """One token's logits are one step late, at one position."""
    return answers_late(engine, lambda count: count == position + 1)


class _Misplaced(DynamicCache):
    """Layer 1 writes each new key and value one place too early, over the token before."""

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        keys, values = super().update(key, value, layer_idx, *args, **kwargs)
        if layer_idx == 1 and key.shape[-2] == 1 and keys.shape[-2] > 1:
            for stored in (keys, values):
                stored[..., -2, :] = stored[..., -1, :]
        return keys, values


class _Cached:
    """A model's decoding with a given cache."""

    def __init__(self, model: nn.Module, cache: Any) -> None:
        self._model, self._cache = model, cache

    @torch.inference_mode()
    def extend(self, ids: Tensor) -> Tensor:
        return self._model(ids, past_key_values=self._cache, use_cache=True).logits

    def close(self) -> None:
        self._cache = None


def writes_one_place_early(engine: Engine, model: nn.Module) -> Engine:
    """KV write at the wrong position."""
    return replace(engine, begin=lambda rows: _Cached(model, _Misplaced(config=model.config)))
