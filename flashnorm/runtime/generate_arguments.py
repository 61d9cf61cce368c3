"""Which arguments of `generate` the accelerated path honours: an allow-list, so that an unknown one is never lost."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import GenerationConfig

from flashnorm.runtime.decode.slots import Slots

GenerationModel = Any  # an nn.Module with Transformers' GenerationMixin, whose types are not exported

_ARGUMENTS = frozenset({"inputs", "input_ids", "attention_mask", "streamer", "tokenizer"})

# Fields of GenerationConfig that the stock processors, the stopping criteria or the output express.
_FIELDS = frozenset(
    {
        *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time", "stop_strings"),
        *("do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"),
        *("repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "renormalize_logits", "sequence_bias"),
        *("forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens"),
        *("remove_invalid_values", "exponential_decay_length_penalty", "num_return_sequences"),
        *("pad_token_id", "bos_token_id", "eos_token_id"),
        *("output_scores", "output_logits", "return_dict_in_generate"),
    }
)

# Fields without effect unless another one, which is not honoured, chooses beams, an assistant or an encoder; and notes.
_INERT = frozenset(
    {
        *("early_stopping", "length_penalty", "num_beam_groups", "diversity_penalty", "low_memory"),
        *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
        *("assistant_lookbehind", "target_lookbehind", "max_matching_ngram_size", "speculation_type"),
        *("decoder_start_token_id", "disable_compile", "transformers_version", "_from_model_config", "_commit_hash"),
    }
)


def merged_config(
    model: GenerationModel, config: GenerationConfig | None, arguments: Mapping[str, Any]
) -> GenerationConfig:
    """What Transformers will make of `config`, the arguments and the model's own defaults; nothing is changed."""
    known = vars(GenerationConfig())
    fields = {name: value for name, value in arguments.items() if name in known}
    logger = logging.getLogger("transformers.generation.utils")
    disabled, logger.disabled = logger.disabled, True  # Transformers merges again, and says then what it has to say
    try:
        return model._prepare_generation_config(copy.deepcopy(config), **fields)[0]
    finally:
        logger.disabled = disabled


def not_honoured(
    model: GenerationModel, slots: Slots, config: GenerationConfig | None, arguments: Mapping[str, Any]
) -> list[str]:
    """The arguments that need the stock path, by name; empty where there are none."""
    fields = vars(GenerationConfig())
    reasons = [
        name
        for name, value in arguments.items()
        if name not in _ARGUMENTS and name not in fields and not _asks_nothing(name, value)
    ]
    merged = merged_config(model, config, arguments)
    neutral = {"guidance_scale": 1.0, **merged._get_default_generation_params()}
    for name in fields.keys() - _FIELDS - _INERT:
        value = getattr(merged, name, None)
        if value is not None and value != neutral.get(name, False):
            reasons.append(f"{name}={value!r}")
    return sorted(reasons) or _unfit_inputs(arguments) or _beyond_one_wave(slots, merged, arguments)


def _asks_nothing(name: str, value: Any) -> bool:
    empty = name in ("logits_processor", "stopping_criteria") and isinstance(value, list) and not value
    return value is None or value is False or empty


def _input_ids(arguments: Mapping[str, Any]) -> Any:
    inputs = arguments.get("inputs")
    return arguments.get("input_ids") if inputs is None else inputs


def _unfit_inputs(arguments: Mapping[str, Any]) -> list[str]:
    """Inputs and masks that are not (rows, length) of ids and of zeros and ones."""
    ids, mask = _input_ids(arguments), arguments.get("attention_mask")
    if ids is None:  # Transformers starts from the bos token
        return [] if mask is None else ["an attention_mask without inputs"]
    if not isinstance(ids, Tensor) or ids.ndim != 2 or 0 in ids.shape or ids.is_floating_point():
        return ["inputs that are not a tensor of token ids (rows, length)"]
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != ids.shape):
        return ["an attention_mask that is not of the inputs' shape"]
    if mask is not None and not ((mask == 0) | (mask == 1)).all():
        return ["an attention_mask with values other than 0 and 1"]
    return []


def _beyond_one_wave(slots: Slots, config: GenerationConfig, arguments: Mapping[str, Any]) -> list[str]:
    """What concerns all rows at one step, where some rows have to wait for the others to finish."""
    ids, free = _input_ids(arguments), len(slots.free_slots())
    rows = (1 if ids is None else ids.shape[0]) * (config.num_return_sequences or 1)
    if not 0 < free < rows:  # without any free slot, the call is an error
        return []
    concerned = {
        "streamer": arguments.get("streamer") is not None,
        "output_scores": config.return_dict_in_generate and config.output_scores,
        "output_logits": config.return_dict_in_generate and config.output_logits,
        # Rows without an end-of-sequence token are not padded: all of them go on until the last one stops.
        "stop_strings without eos_token_id": config.stop_strings is not None and config.eos_token_id is None,
        "max_time without eos_token_id": config.max_time is not None and config.eos_token_id is None,
    }
    return [f"{name} for {rows} rows with {free} free slots" for name, it_is in concerned.items() if it_is]
