"""Inputs that run a tiny model's whole language part, and the logits they give."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from tests.zoo.rules import FIRST_SPECIAL_ID

BATCH, LENGTH, DECODER_LENGTH, ENCODER_LENGTH = 2, 12, 7, 5
_FIRST_PLAIN_ID = 5


def forward_inputs(model: torch.nn.Module, family: str) -> dict[str, Any]:
    """Deterministic keyword arguments for `model`: (2, 12) token ids, and (2, 7) decoder ids for `seq2seq`.

    A decoder with cross attention also gets (2, 5, width) encoder states, so that no layer is passed over.
    """
    model_type = model.config.model_type
    if model_type in _WHOLE:
        return _WHOLE[model_type](model)
    inputs: dict[str, Any] = {"input_ids": tokens(LENGTH, seed=1)}
    if family == "seq2seq" or model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens(DECODER_LENGTH, seed=2)
    elif _has_cross_attention(model):
        inputs["encoder_hidden_states"] = states(ENCODER_LENGTH, _cross_width(model), seed=3)
    if model_type in _EXTRA:
        inputs |= _EXTRA[model_type](model)
    return inputs


def logits(model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    """The logits of one forward pass without a cache, (batch, tokens, vocabulary) for a language model."""
    with torch.no_grad():
        output = model(**inputs, use_cache=False)
    return output[0] if isinstance(output, tuple) else output.logits


def tokens(length: int, seed: int, batch: int = BATCH, high: int = FIRST_SPECIAL_ID) -> torch.Tensor:
    """(batch, length) token ids that no config gives a role."""
    return torch.randint(_FIRST_PLAIN_ID, high, (batch, length), generator=torch.Generator().manual_seed(seed))


def states(*shape: int, seed: int) -> torch.Tensor:
    """(2, *shape) standard normal numbers in place of hidden states or pixels."""
    return torch.randn(BATCH, *shape, generator=torch.Generator().manual_seed(seed))


def _has_cross_attention(model: torch.nn.Module) -> bool:
    takes_states = "encoder_hidden_states" in inspect.signature(model.forward).parameters
    names = ("encoder_attn", "cross_attn", "crossattention")
    return takes_states and any(part in name for name, _ in model.named_parameters() for part in names)


def _cross_width(model: torch.nn.Module) -> int:
    return getattr(model.config, "cross_attention_hidden_size", None) or model.config.hidden_size


def _assistant(model: torch.nn.Module) -> dict[str, Any]:
    """A speculative head reads one token's embedding from its target, and its keys and values in place of its own."""
    text = model.config.get_text_config()
    shared = {}
    for layer_type in sorted(set(text.layer_types)):
        layer = text.per_layer_config[text.layer_types.index(layer_type)]
        shape = (layer.num_key_value_heads, LENGTH, layer.head_dim)
        shared[layer_type] = (states(*shape, seed=4), states(*shape, seed=5))
    return {
        "inputs_embeds": states(1, 2 * model.config.backbone_hidden_size, seed=3),
        "position_ids": torch.full((BATCH, 1), LENGTH),
        "shared_kv_states": shared,
    }


def _codebooks(model: torch.nn.Module) -> dict[str, Any]:
    """One row of ids per codebook."""
    inputs: dict[str, Any] = {"input_ids": tokens(LENGTH, seed=1, batch=BATCH * model.config.num_codebooks)}
    if _has_cross_attention(model):
        inputs["encoder_hidden_states"] = states(ENCODER_LENGTH, _cross_width(model), seed=3)
    return inputs


def _cross_states(model: torch.nn.Module) -> dict[str, Any]:
    return {"cross_attention_states": states(ENCODER_LENGTH, model.config.hidden_size, seed=3)}


def _encoder_outputs(model: torch.nn.Module) -> dict[str, Any]:
    return {"encoder_outputs": (states(ENCODER_LENGTH, model.config.hidden_size, seed=3),)}


def _shapes_and_sounds(model: torch.nn.Module) -> dict[str, Any]:
    return {
        "input_shape_ids": tokens(LENGTH, seed=6, high=model.config.shape_vocab_size),
        "input_pronunciation_ids": tokens(LENGTH, seed=7, high=model.config.pronunciation_vocab_size),
    }


# By the config's model type: inputs that replace the usual ones, and inputs beside them.
_WHOLE: dict[str, Callable[[torch.nn.Module], dict[str, Any]]] = {
    "gemma4_assistant": _assistant,
    "gemma4_unified_assistant": _assistant,
    "musicgen_decoder": _codebooks,
    "musicgen_melody_decoder": _codebooks,
}
_EXTRA: dict[str, Callable[[torch.nn.Module], dict[str, Any]]] = {
    "mllama_text_model": _cross_states,
    "roc_bert": _shapes_and_sounds,
    "whisper": _encoder_outputs,
}
