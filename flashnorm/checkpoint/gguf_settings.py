"""Settings that decide what a model computes and that Transformers may not take over from a GGUF's metadata."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedConfig

from flashnorm.checkpoint.gguf_file import metadata
from flashnorm.checkpoint.gguf_rope import FREQUENCY_FACTORS, llama3_rope
from flashnorm.errors import CheckpointError

if TYPE_CHECKING:
    from gguf import GGUFReader

_INSTEAD = "start from the model's safetensors checkpoint instead"
# A GGUF stores fp32, a config fp64: one rounding apart.
_FP32_ROUNDING = 2.0**-24


def complete_config(file: Path, reader: GGUFReader, config: PreTrainedConfig) -> None:
    """Add to `config` what Transformers left out. Raises `CheckpointError` for what cannot be expressed exactly."""
    _complete_rope(file, reader, config)
    _refuse_unstated_attention_scale(file, config)


def ignored_settings(reader: GGUFReader, config: PreTrainedConfig) -> tuple[str, ...]:
    """Metadata keys of the architecture whose number or word occurs nowhere in `config`."""
    prefix = metadata(reader, "general.architecture") + "."
    known = list(_scalars(config.to_dict()))
    return tuple(
        key
        for key, field in reader.fields.items()
        if key.startswith(prefix) and not any(_same(value, field.contents()) for value in known)
    )


def _complete_rope(file: Path, reader: GGUFReader, config: PreTrainedConfig) -> None:
    architecture = metadata(reader, "general.architecture")
    factors = next((tensor for tensor in reader.tensors if tensor.name == FREQUENCY_FACTORS), None)
    scaling = metadata(reader, f"{architecture}.rope.scaling.type", "none")
    current = dict(getattr(config, "rope_parameters", None) or {})
    if factors is not None:
        rope = llama3_rope(torch.from_numpy(factors.data.copy()), current)
        if rope is None:
            raise CheckpointError(
                f"{file} stores RoPE frequency factors that are not Llama 3's, which no config can express; {_INSTEAD}"
            )
        config.rope_parameters = rope
    elif scaling != "none" and current.get("rope_type", "default") == "default":
        raise CheckpointError(
            f"{file} scales RoPE by {scaling!r}, which Transformers does not take over from a GGUF of architecture "
            f"{architecture!r}; {_INSTEAD}"
        )


def _refuse_unstated_attention_scale(file: Path, config: PreTrainedConfig) -> None:
    """No GGUF states Gemma's attention scale: it is the head's width, except in the 27B models."""
    scale, head_dim = getattr(config, "query_pre_attn_scalar", None), getattr(config, "head_dim", None)
    if scale is not None and scale != head_dim:
        raise CheckpointError(
            f"{file} has heads of width {head_dim}, for which a GGUF does not state {config.model_type}'s attention "
            f"scale; {_INSTEAD}"
        )


def _scalars(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for item in value.values():
            yield from _scalars(item)
    elif isinstance(value, (list, tuple)):
        yield list(value)
        for item in value:
            yield from _scalars(item)
    else:
        yield value


def _same(value: Any, stored: Any) -> bool:
    if isinstance(value, float) or isinstance(stored, float):
        numbers = isinstance(value, (int, float)) and isinstance(stored, (int, float))
        return numbers and abs(value - stored) <= abs(stored) * _FP32_ROUNDING
    return value == stored
