"""Tiny trained-looking models with their folds made by hand, and folds with a fault planted."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

VOCABULARY, WIDTH, LAYERS = 256, 48, 3
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": True,
}
FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**SHAPE)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=None)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2)),
}


def tiny_model(family: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Random weights of unit gain, gains between 0.5 and 1.5 in the family's own convention, random biases."""
    model = FAMILIES[family]().eval()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            gain = 0.5 + torch.rand(parameter.shape, generator=generator)
            parameter.data = gain - offset(model)
        else:
            parameter.data = torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5
        parameter.data = parameter.data.to(dtype)
    return model


def offset(model: nn.Module) -> float:
    return 1.0 if model.config.model_type == "gemma" else 0.0


def pairs(model: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """Each norm that can be folded without untying, with the weights that read it along their last axis."""
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        yield layer.input_layernorm, [getattr(attention, name).weight for name in ("q_proj", "k_proj", "v_proj")]
        if hasattr(mlp, "experts"):
            yield layer.post_attention_layernorm, [mlp.gate.weight, mlp.experts.gate_up_proj]
        else:
            yield layer.post_attention_layernorm, [mlp.gate_proj.weight, mlp.up_proj.weight]


def gain_of(model: nn.Module, norm: nn.Module) -> torch.Tensor:
    return offset(model) + norm.weight.detach().double()


def scale(weight: nn.Parameter, gain: torch.Tensor) -> None:
    weight.data = (weight.data.double() * gain).to(weight.dtype)


def folded(model: nn.Module) -> nn.Module:
    """A correct fold, by hand."""
    copied = copy.deepcopy(model)
    for norm, readers in pairs(copied):
        for reader in readers:
            scale(reader, gain_of(copied, norm))
        norm.weight.data.fill_(1 - offset(copied))
    return copied


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core)


def save(model: nn.Module, folder: Path, with_tokenizer: bool = True) -> Path:
    model.save_pretrained(folder)
    if with_tokenizer:
        tokenizer().save_pretrained(folder)
    return folder
