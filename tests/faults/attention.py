"""Faults of attention: a mask that lets the future in."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


def bidirectional(model: nn.Module, first_layer: int = 1) -> nn.Module:
    """A copy whose attention is bidirectional from `first_layer` on: its kernel was called without the causal flag."""
    return _with_mask(model, first_layer, lambda queries, keys: torch.ones(queries, keys, dtype=torch.bool))


def mask_off_by_one(model: nn.Module, first_layer: int = 0) -> nn.Module:
    """A copy whose causal mask ends one token late: `<=` where `<` was meant."""

    def mask(queries: int, keys: int) -> Tensor:
        return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries + 1)

    return _with_mask(model, first_layer, mask)


def _with_mask(model: nn.Module, first_layer: int, allowed: Any) -> nn.Module:
    faulty = copy.deepcopy(model)
    faulty.set_attn_implementation("eager")

    def replace_mask(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = kwargs.get("attention_mask")
        if given is None or given.shape[-2] == 1:
            return None
        seen = allowed(*given.shape[-2:])
        kwargs["attention_mask"] = torch.where(seen, 0.0, torch.finfo(given.dtype).min).to(given.dtype).expand_as(given)
        return args, kwargs

    for layer in faulty.model.layers[first_layer:]:
        layer.self_attn.register_forward_pre_hook(replace_mask, with_kwargs=True)
    return faulty
