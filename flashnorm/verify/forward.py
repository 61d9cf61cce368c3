"""One forward pass: token ids in, logits of every position out."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from flashnorm.errors import ConfigError

TransformersModel = Any  # a `PreTrainedModel`, whose own annotations lack most of what is used here


def logits_of(model: TransformersModel, ids: torch.Tensor) -> torch.Tensor:
    """The logits (count * length, vocabulary) at every position of `ids` (count, length), in the model's dtype.

    An encoder-decoder reads `ids` with its encoder, and with its decoder the same ids after its start token. Raises
    `ConfigError` where the model gives no logits.
    """
    inputs: dict[str, Any] = {"input_ids": ids}
    if {"use_cache", "kwargs"} & inspect.signature(model.forward).parameters.keys():
        inputs["use_cache"] = False
    if model.config.is_encoder_decoder:
        start = torch.full_like(ids[:, :1], decoder_start(model))
        inputs["decoder_input_ids"] = torch.cat([start, ids[:, :-1]], dim=1)
    with torch.inference_mode():
        output: Any = model(**inputs)
    if getattr(output, "logits", None) is None:
        raise ConfigError(
            f"{type(model).__name__} gives no logits to compare; give a checkpoint of a model with a head"
        )
    return output.logits.flatten(0, -2)


def decoder_start(model: TransformersModel) -> int:
    """The id that an encoder-decoder's decoder starts with, from wherever the model says it; 0 where nothing does."""
    for config in (model.generation_config, model.config):
        for name in ("decoder_start_token_id", "bos_token_id"):
            if isinstance(getattr(config, name, None), int):
                return int(getattr(config, name))
    return 0
