"""Inputs that make a model of any kind run all of itself, in as few tokens as will do."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

_BATCH, _TOKENS = 2, 6


def trace_runs(model: nn.Module, tokens: int = _TOKENS) -> list[dict[str, Any]]:
    """The keyword arguments of every run that a trace of `model` needs.

    Token ids are (2, tokens) int64; an encoder-decoder gets decoder ids of the same shape.
    """
    parameters = inspect.signature(model.forward).parameters
    config = getattr(model, "config", None)
    inputs: dict[str, Any] = {"input_ids": token_ids(model, tokens, seed=1)}
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = token_ids(model, tokens, seed=2)
    if "use_cache" in parameters or "kwargs" in parameters:
        inputs["use_cache"] = False
    return [inputs]


def token_ids(model: nn.Module, tokens: int, seed: int) -> torch.Tensor:
    """Ordinary tokens: from the middle of the vocabulary, away from the special ids at either end."""
    vocabulary = _vocabulary_size(model)
    low, high = min(5, vocabulary - 1), max(vocabulary * 3 // 4, min(6, vocabulary))
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, (_BATCH, tokens), generator=generator)


def _vocabulary_size(model: nn.Module) -> int:
    get = getattr(model, "get_input_embeddings", None)
    embedding = get() if get is not None else None
    weight = getattr(embedding, "weight", None)
    if isinstance(weight, torch.Tensor):
        return int(weight.shape[0])
    sizes = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    return min(sizes) if sizes else 32
