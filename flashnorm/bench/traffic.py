"""How many bytes one decode step has to read: every weight that it multiplies by, once, and the cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_PROBE = 2  # tokens


def weight_bytes(model: nn.Module) -> int | None:
    """Bytes of the weights that a step of batch 1 reads: the decoder's and the head's, each once.

    An embedding that is not tied to the head counts nothing, since one row of it is read. None where a step reads only
    some of the weights, as with experts.
    """
    causal: Any = model
    config = causal.config.get_text_config()
    if getattr(config, "num_experts_per_tok", None):
        return None
    head = causal.get_output_embeddings()
    read = {id(p): p for part in (causal.get_decoder(), head) for p in part.parameters()}
    embedding = causal.get_input_embeddings().weight
    if embedding is not head.weight:
        read.pop(id(embedding), None)
    return sum(parameter.nbytes for parameter in read.values())


@torch.no_grad()
def cache_bytes(model: nn.Module, context: float) -> float | None:
    """Bytes of keys and values that a step of batch 1 reads with `context` tokens behind it, windows considered.

    The model runs once on two tokens, and the cache that it fills is weighed. None for caches that are no keys and
    values of each token.
    """
    causal: Any = model
    ids = torch.zeros(1, _PROBE, dtype=torch.long, device=causal.device)
    output = causal(ids, use_cache=True)
    cache = output.get("cache", output.get("past_key_values"))
    total = 0.0
    for layer in getattr(cache, "layers", [None]):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or keys.shape[-2] != _PROBE:
            return None
        window = getattr(layer, "sliding_window", None)
        total += (keys.nbytes + values.nbytes) / _PROBE * min(context, window or context)
    return total


def prefill_operations(model: nn.Module, tokens: int) -> int:
    """Floating-point operations that a prompt of so many tokens takes at least, the head's for its last token alone.

    Two for each weight of a linear and token, and in causal attention 2 · 2 · head_dim for each query head and each
    pair of a token with itself or one before it.
    """
    causal: Any = model
    config, head = causal.config.get_text_config(), causal.get_output_embeddings()
    linears = [part for part in causal.get_decoder().modules() if isinstance(part, nn.Linear)]
    products = tokens * sum(part.weight.numel() for part in linears) + head.weight.numel()
    pairs = config.num_hidden_layers * config.num_attention_heads * tokens * (tokens + 1) // 2
    return 2 * products + 4 * config.head_dim * pairs
