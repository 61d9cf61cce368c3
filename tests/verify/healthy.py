"""Healthy models of different kinds, on which no check may fail."""

from __future__ import annotations

# Plain and one-plus gains, LayerNorm, sandwich and post-norms, latent attention, sliding windows, soft caps, attention
# sinks, experts, state spaces, linear attention, convolutions, learned and no positions.
FAMILIES = (
    "llama", "gemma2", "gemma3_text", "qwen3", "olmo2", "cohere2", "gpt2", "opt", "phi", "stablelm", "falcon_h1",
    "jamba", "mixtral", "deepseek_v3", "gpt_oss", "qwen3_next", "lfm2", "exaone4", "diffllama", "glm4_moe",
)  # fmt: skip
