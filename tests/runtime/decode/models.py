"""Tiny models with random weights, gains away from one, of the families that a decode program must know."""

from __future__ import annotations

import torch
import transformers
from torch import nn

HIDDEN, VOCABULARY, LENGTH = 48, 101, 96

_COMMON = {
    "hidden_size": HIDDEN,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
_LOCAL = ["sliding_attention", "full_attention", "sliding_attention"]

# Name -> Transformers' config class and what it takes beyond the common.
SUPPORTED = {
    "llama": ("LlamaConfig", {}),
    "llama_tied": ("LlamaConfig", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama_yarn": ("LlamaConfig", {"rope_parameters": _YARN}),
    "mistral": ("MistralConfig", {"sliding_window": 8}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "smollm3": ("SmolLM3Config", {"no_rope_layer_interval": 2}),
    "phi3": ("Phi3Config", {}),
    "phi3_partial": ("Phi3Config", {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 1e4}}),
    "granite": (
        "GraniteConfig",
        {
            "embedding_multiplier": 12.0,
            "logits_scaling": 6.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.0078125,
        },
    ),
    "gemma2": ("Gemma2Config", {"sliding_window": 8, "query_pre_attn_scalar": 24}),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 8, "layer_types": _LOCAL}),
    "glm4": ("Glm4Config", {"partial_rotary_factor": 0.5}),  # interleaved rotation
    "exaone4": ("Exaone4Config", {"sliding_window": 8, "layer_types": _LOCAL}),  # QK-norm, every other layer unrotated
    "arcee": ("ArceeConfig", {}),  # a plain MLP, with a squared ReLU
}


def tiny(name: str, dtype: torch.dtype = torch.float32, **changes: object) -> nn.Module:
    """One of `SUPPORTED`, in eval mode, gains and biases scattered; `changes`: to its config."""
    config, more = SUPPORTED[name]
    return scattered(getattr(transformers, config)(**{**_COMMON, **more, **changes}), dtype)


def other(config: str, **arguments: object) -> nn.Module:
    """Any other causal LM with the common sizes."""
    return scattered(getattr(transformers, config)(**{**_COMMON, **arguments}))


def scattered(config: transformers.PreTrainedConfig, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model with every vector moved off its initial value, and weights large enough for each part to matter."""
    torch.manual_seed(0)
    # Some releases run Gemma 2 through an attention that drops its soft cap, unless told otherwise.
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter) if parameter.dim() == 1 else parameter * 3)
    return model.to(dtype).eval()


def tokens(count: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()
