"""Llama 3's RoPE scaling comes back from its frequency factors, and nothing else passes for it."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from flashnorm.checkpoint.gguf_rope import llama3_rope

THETA = 500000.0


def _inverse_frequencies(head_dim: int, rope: dict) -> torch.Tensor:
    config = LlamaConfig(hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim, rope_parameters=rope)
    return LlamaRotaryEmbedding(config).inv_freq


def _factors(head_dim: int, rope: dict) -> torch.Tensor:
    """What a GGUF stores: by how much each frequency is divided, in fp32."""
    plain = _inverse_frequencies(head_dim, {"rope_type": "default", "rope_theta": THETA})
    return plain / _inverse_frequencies(head_dim, rope)


@pytest.mark.parametrize("factor", [8.0, 32.0])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_llama3_scaling_is_recovered(factor: float, head_dim: int) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": THETA,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    recovered = llama3_rope(_factors(head_dim, rope), {"rope_type": "default", "rope_theta": THETA})
    assert recovered is not None
    assert recovered.pop("factor") == pytest.approx(rope.pop("factor"), rel=1e-6)
    assert recovered == rope


def test_other_factors_are_not_taken_for_llama3() -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": THETA,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 2.0,
        "original_max_position_embeddings": 8192,
    }
    current = {"rope_type": "default", "rope_theta": THETA}
    assert llama3_rope(_factors(128, rope), current) is None
    assert llama3_rope(torch.full((64,), 8.0), current) is None
