"""`generate` on slots: what users pass to Transformers' `generate`, run by a decode program.

Transformers itself merges the configuration, validates the arguments, builds the logits processors and the stopping
criteria, and warns; then it calls the decoding loop of this room in place of its own (`custom_generate`). So a call
means here what it means there, in every version of Transformers.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor, nn
from transformers import GenerationConfig, StoppingCriteriaList
from transformers.generation.stopping_criteria import StopStringCriteria

from flashnorm.runtime.decode.slots import Slots
from flashnorm.runtime.generate_arguments import GenerationModel, merged_config, not_honoured
from flashnorm.runtime.generate_loop import Prepared, decode_on_slots


def generate(
    model: nn.Module,
    slots: Slots,
    inputs: Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    **kwargs: Any,
) -> Any:
    """Generate as `type(model).generate` does, with the tokens computed by `slots`.

    `inputs`, or `input_ids` among `kwargs`: (rows, length) int64, padded on either side, with or without an
    `attention_mask`; a row continues from its last token that is not padding. More rows than free slots run in waves.
    `kwargs`: any argument of Transformers' `generate`. Where one cannot be honoured, the whole call runs on the stock
    path, with one `UserWarning` that names it.

    Returns (rows, length + new tokens) int64 on the inputs' device, or a `GenerateDecoderOnlyOutput` without a cache
    where `return_dict_in_generate` is set. Sampling goes by torch's global CPU generator: the same `torch.manual_seed`,
    the same text.

    Raises `CapacityError`, before anything runs, where no slot is free or a sequence would exceed `slots.max_length`;
    `Refusal` for a prompt of nothing but padding; and what Transformers raises for arguments that it refuses. After an
    error or a `KeyboardInterrupt` the slots are free again.
    """
    given = {"inputs": inputs, **kwargs}
    reasons = not_honoured(model, slots, generation_config, given)
    if reasons:
        because = f"the accelerated one cannot honour: {', '.join(reasons)}"
        return on_stock_path(model, because, {"generation_config": generation_config, **given})
    return _accelerated(model, slots, inputs, generation_config, kwargs)


def on_stock_path(model: nn.Module, because: str, arguments: dict[str, Any]) -> Any:
    """Generate as Transformers does, whatever the arguments, with one `UserWarning` that says why."""
    warnings.warn(f"this call of generate runs on the stock path, because {because}", UserWarning, stacklevel=3)
    return _stock(model, **arguments)


def _stock(model: nn.Module, **arguments: Any) -> Any:
    """The class's own method: an accelerated model's attribute `generate` leads here."""
    generation_model: Any = type(model)
    return generation_model.generate(model, **arguments)


def _accelerated(
    model: nn.Module,
    slots: Slots,
    inputs: Tensor | None,
    generation_config: GenerationConfig | None,
    kwargs: dict[str, Any],
) -> Any:
    streamer = kwargs.get("streamer")

    def decoding(
        model: nn.Module,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,  # named ones would be taken out of the arguments before Transformers prepares them
    ) -> Any:
        mask = model_kwargs.get("attention_mask")
        call = Prepared(input_ids, mask, logits_processor, stopping_criteria, generation_config, streamer)
        return decode_on_slots(slots, call)

    generation_config, kwargs = _stop_strings_as_criteria(model, generation_config, kwargs)
    return _stock(model, inputs=inputs, generation_config=generation_config, custom_generate=decoding, **kwargs)


def _stop_strings_as_criteria(
    model: GenerationModel, config: GenerationConfig | None, kwargs: dict[str, Any]
) -> tuple[GenerationConfig | None, dict[str, Any]]:
    """Transformers takes the tokenizer away where `custom_generate` is a function, so the criterion is built here.

    The fields of `config` become arguments, since Transformers warns of a configuration beside arguments.
    """
    strings = merged_config(model, config, kwargs).stop_strings
    if strings is None or kwargs.get("tokenizer") is None:  # without a tokenizer, Transformers says what is missing
        return config, kwargs
    known = vars(GenerationConfig())
    fields = {k: v for k, v in vars(config or GenerationConfig()).items() if k in known and v is not None}
    fields.pop("transformers_version", None)
    criteria = StoppingCriteriaList([StopStringCriteria(stop_strings=strings, tokenizer=kwargs["tokenizer"])])
    return None, {**fields, **kwargs, "stop_strings": None, "stopping_criteria": criteria}
