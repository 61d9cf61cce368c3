"""Inputs that make a model of any kind run all of itself, in as few tokens as will do."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

_BATCH, _TOKENS = 2, 6


def trace_runs(model: nn.Module, tokens: int = _TOKENS) -> list[dict[str, Any]]:
    """The keyword arguments of every run that a trace of `model` needs.

    Token ids are (2, tokens) int64, with one row for each codebook of an audio decoder; an encoder-decoder gets decoder
    ids of the same shape, and a decoder with cross attention gets encoder states (2, tokens, width).
    """
    parameters = inspect.signature(model.forward).parameters
    config = getattr(model, "config", None)
    rows = _BATCH * (getattr(config, "num_codebooks", None) or 1 if "input_ids" in parameters else 1)
    inputs: dict[str, Any] = {"input_ids": token_ids(model, tokens, seed=1, rows=rows)}
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = token_ids(model, tokens, seed=2)
    elif _reads_encoder(model):
        for name in ("encoder_hidden_states", "cross_attention_states"):
            if name in parameters:
                inputs[name] = _states(tokens, _cross_width(config))
    if "use_cache" in parameters or "kwargs" in parameters:
        inputs["use_cache"] = False
    return [inputs]


def _reads_encoder(model: nn.Module) -> bool:
    """Cross attention is there to be run: by the config, or by a module of that name."""
    config = getattr(model, "config", None)
    names = ("encoder_attn", "cross_attn", "crossattention")
    return bool(getattr(config, "add_cross_attention", False)) or any(
        part in name for name, _ in model.named_modules() for part in names
    )


def _cross_width(config: Any) -> int:
    return int(getattr(config, "cross_attention_hidden_size", None) or config.hidden_size)


def _states(tokens: int, width: int) -> torch.Tensor:
    return torch.randn(_BATCH, tokens, width, generator=torch.Generator().manual_seed(3))


def token_ids(model: nn.Module, tokens: int, seed: int, rows: int = _BATCH) -> torch.Tensor:
    """Ordinary tokens: from the middle of the vocabulary, away from the special ids at either end."""
    vocabulary = _vocabulary_size(model)
    low, high = min(5, vocabulary - 1), max(vocabulary * 3 // 4, min(6, vocabulary))
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, (rows, tokens), generator=generator)


def _vocabulary_size(model: nn.Module) -> int:
    get = getattr(model, "get_input_embeddings", None)
    embedding = get() if get is not None else None
    weight = getattr(embedding, "weight", None)
    if isinstance(weight, torch.Tensor):
        return int(weight.shape[0])
    sizes = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    return min(sizes) if sizes else 32
