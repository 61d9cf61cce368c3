"""Faults of company: a row reads its neighbour's, a slot remembers, padding shifts a position, runs differ."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from flashnorm.runtime.decode.sampling import Sampling
from flashnorm.verify.engines.engine import Engine
from tests.runtime.plain_slots import PlainSlots


def neighbour_read(model: nn.Module) -> nn.Module:
    """A copy whose second layer's MLP reads one element beyond the end of its row: the next row's first.

    What a kernel does that loads a hidden size of an odd number of elements in pairs. The last row reads zeros.
    """
    faulty = copy.deepcopy(model)

    def overrun(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (x,) = args
        beyond = torch.cat([x[1:, ..., 0], torch.zeros_like(x[:1, ..., 0])])
        return (torch.cat([x[..., :-1], (x[..., -1] + beyond)[..., None]], dim=-1),)

    faulty.model.layers[1].mlp.register_forward_pre_hook(overrun)
    return faulty


class UnclearedSlots(PlainSlots):
    """A slot's cache is not cleared: the next sequence goes on behind what the last one left."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._left: dict[int, Any] = {}

    def free(self, slot: int) -> None:
        self._left[slot] = self._held[slot].cache
        super().free(slot)

    def prefill(self, slot: int, ids: Sequence[int] | Tensor, sampling: Sampling = Sampling()) -> Tensor:  # noqa: B008
        if slot not in self._left:
            return super().prefill(slot, ids, sampling)
        # The old cache comes first, the new sequence after it.
        first, rest = torch.as_tensor(ids)[:1], torch.as_tensor(ids)[1:]
        super().prefill(slot, first, sampling)
        self._held[slot].cache = self._left[slot]
        return self._feed(slot, torch.cat([first, rest]))


def shifted_after_padding(engine: Engine, model: nn.Module) -> Engine:
    """Position ids after padding are off by one in the second half: as if the padding's length were counted as well."""

    @torch.inference_mode()
    def padded(ids: Tensor, mask: Tensor) -> Tensor:
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        positions[:, positions.shape[1] // 2 :] += (mask.sum(-1, keepdim=True) < mask.shape[1]).long()
        return model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits

    return replace(engine, padded=padded)


def unwritten_memory(engine: Engine) -> Engine:
    """One logit is read from memory that nobody wrote: another value every time."""
    generator = torch.Generator().manual_seed(0)

    def fresh(ids: Tensor) -> Tensor:
        logits = engine.fresh(ids).clone()
        logits[..., -1, 0] += torch.rand((), generator=generator).to(logits.dtype)
        return logits

    return replace(engine, fresh=fresh)
