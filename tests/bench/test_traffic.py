from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
)

from flashnorm.bench.traffic import cache_bytes, weight_bytes

HIDDEN, WIDE, LAYERS, HEADS, KV, HEAD, VOCABULARY = 32, 48, 3, 4, 2, 8, 64
SHAPE: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": HEAD,
    "vocab_size": VOCABULARY,
}


def model(config: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    return AutoModelForCausalLM.from_config(config).to(dtype).eval()


@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_counted_once(tied: bool) -> None:
    attention = HIDDEN * HEAD * (2 * HEADS + 2 * KV)
    layer = attention + 3 * HIDDEN * WIDE + 2 * HIDDEN
    expected = 2 * (LAYERS * layer + HIDDEN + HIDDEN * VOCABULARY)
    assert weight_bytes(model(LlamaConfig(**SHAPE, tie_word_embeddings=tied))) == expected


def test_experts_have_no_one_figure() -> None:
    assert weight_bytes(model(MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2))) is None


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 2), (torch.float32, 4)])
def test_the_cache(dtype: torch.dtype, size: int) -> None:
    token = 2 * KV * HEAD * size
    assert cache_bytes(model(LlamaConfig(**SHAPE), dtype), 100.5) == LAYERS * token * 100.5


def test_windows() -> None:
    token = 2 * KV * HEAD * 2
    assert cache_bytes(model(MistralConfig(**SHAPE, sliding_window=10)), 100) == LAYERS * token * 10
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    mixed = Gemma3TextConfig(**SHAPE, sliding_window=10, layer_types=kinds)
    assert cache_bytes(model(mixed), 100) == token * (10 + 100 + 10)
    assert cache_bytes(model(mixed), 5) == token * 15


def test_a_state_is_no_cache_of_tokens() -> None:
    config = MambaConfig(hidden_size=HIDDEN, num_hidden_layers=2, vocab_size=VOCABULARY)
    assert cache_bytes(model(config, torch.float32), 100) is None
