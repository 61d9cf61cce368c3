"""Nothing is silently ignored: what cannot be honoured runs on the stock path, and is named."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from transformers import (
    CompileConfig,
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteriaList,
    SuppressTokensLogitsProcessor,
    WatermarkingConfig,
)
from transformers.generation.stopping_criteria import MaxLengthCriteria

from flashnorm.runtime.generate import generate
from flashnorm.runtime.generate_arguments import not_honoured
from tests.runtime.plain_slots import PlainSlots, tiny_llama
from tests.runtime.test_generate import BATCH, MODEL, SINGLE, Recorder

LONG = {"max_new_tokens": 4}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_beams": 2}, "num_beams=2"),
        ({"logits_processor": LogitsProcessorList([SuppressTokensLogitsProcessor([48])])}, "logits_processor"),
        ({"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(7)])}, "stopping_criteria"),
        ({"prefix_allowed_tokens_fn": lambda row, ids: [3, 4, 5]}, "prefix_allowed_tokens_fn"),
        ({"assistant_model": MODEL}, "assistant_model"),
        ({"prompt_lookup_num_tokens": 2}, "prompt_lookup_num_tokens=2"),
        ({"return_dict_in_generate": True, "output_attentions": True}, "output_attentions=True"),
        ({"return_dict_in_generate": True, "output_hidden_states": True}, "output_hidden_states=True"),
        ({"guidance_scale": 1.5}, "guidance_scale=1.5"),
        ({"use_cache": False}, "use_cache=False"),
        ({"cache_implementation": "static"}, "cache_implementation='static'"),
        ({"past_key_values": DynamicCache()}, "past_key_values"),
        ({"position_ids": torch.arange(5)[None]}, "position_ids"),
        ({"inputs_embeds": MODEL.get_input_embeddings()(SINGLE["input_ids"])}, "inputs_embeds"),
        ({"generation_config": GenerationConfig(num_beams=3)}, "num_beams=3"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_stock_path_with_one_warning(options: dict[str, Any], named: str) -> None:
    slots = PlainSlots(MODEL)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        answer = generate(MODEL, slots, **SINGLE, **options, **LONG)
    ours = [str(w.message) for w in caught if "this call of generate" in str(w.message)]
    assert ours == [f"this call of generate runs on the stock path, because the accelerated one cannot honour: {named}"]
    assert slots.fed == 0
    if "past_key_values" in options:
        options = {"past_key_values": DynamicCache()}  # the first one is full by now
    expected = MODEL.generate(**SINGLE, **options, **LONG)
    sequences, wanted = (getattr(a, "sequences", a) for a in (answer, expected))
    assert sequences.tolist() == wanted.tolist()
    assert type(answer) is type(expected)


def test_an_unknown_argument_meets_what_transformers_says() -> None:
    with pytest.warns(UserWarning, match="cannot honour: frobnicate"), pytest.raises(ValueError, match="frobnicate"):
        generate(MODEL, PlainSlots(MODEL), **SINGLE, frobnicate=3, **LONG)


def test_several_are_named_in_one_warning() -> None:
    reasons = not_honoured(MODEL, PlainSlots(MODEL), None, {**SINGLE, "num_beams": 2, "synced_gpus": True})
    assert reasons == ["num_beams=2", "synced_gpus"]


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 1, "guidance_scale": 1.0, "length_penalty": 1.0, "early_stopping": False},
        {"logits_processor": None, "assistant_model": None, "synced_gpus": False},
        {"logits_processor": LogitsProcessorList(), "stopping_criteria": []},
        {"disable_compile": True, "num_assistant_tokens": 5, "output_attentions": False},
        {"temperature": 0.7, "do_sample": True, "top_k": 5, "top_p": 0.9, "min_p": 0.1},
    ],
    ids=str,
)
def test_values_that_ask_for_nothing(options: dict[str, Any]) -> None:
    assert not_honoured(MODEL, PlainSlots(MODEL), None, {**SINGLE, **options}) == []


def test_the_models_own_configuration_counts() -> None:
    model = tiny_llama()
    model.generation_config.penalty_alpha = 0.6
    model.generation_config.frobnicated = "by an older release; Transformers does not look at it"
    assert not_honoured(model, PlainSlots(model), None, dict(SINGLE)) == ["penalty_alpha=0.6"]
    assert model.generation_config.max_length is None


@pytest.mark.parametrize(
    ("inputs", "named"),
    [
        ({"inputs": [[1, 2]]}, "inputs that are not a tensor of token ids"),
        ({"inputs": torch.zeros(1, 0, dtype=torch.long)}, "inputs that are not a tensor of token ids"),
        ({**SINGLE, "attention_mask": torch.ones(1, 9)}, "not of the inputs' shape"),
        ({**SINGLE, "attention_mask": torch.full((1, 5), 2)}, "values other than 0 and 1"),
        ({"attention_mask": torch.ones(1, 1)}, "an attention_mask without inputs"),
    ],
)
def test_inputs_of_other_kinds(inputs: dict[str, Any], named: str) -> None:
    (reason,) = not_honoured(MODEL, PlainSlots(MODEL), None, inputs)
    assert named in reason


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"streamer": Recorder()}, "streamer for 3 rows with 2 free slots"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores for 3 rows with 2 free slots"),
        ({"max_time": 1.0}, "max_time without eos_token_id for 3 rows with 2 free slots"),
        (
            {"do_sample": True, "num_return_sequences": 2, "streamer": Recorder()},
            "streamer for 6 rows with 2 free slots",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_needs_all_rows_at_once(options: dict[str, Any], named: str) -> None:
    assert not_honoured(MODEL, PlainSlots(MODEL, 2), None, {**BATCH, **options}) == [named]
    assert not_honoured(MODEL, PlainSlots(MODEL, 6), None, {**BATCH, **options}) == []


CHECKED_BY_TRANSFORMERS = {  # which takes no other kind of value
    "cache_implementation": "static",
    "compile_config": CompileConfig(),
    "watermarking_config": WatermarkingConfig(),
}


@pytest.mark.parametrize("field", sorted(vars(GenerationConfig())))
def test_every_field_of_the_configuration_is_decided(field: str) -> None:
    """Either it is honoured, or without effect alone, or a value that asks for something is named."""
    from flashnorm.runtime.generate_arguments import _FIELDS, _INERT

    if field in _FIELDS | _INERT:
        assert not (field in _FIELDS and field in _INERT)
        return
    model = tiny_llama()
    setattr(model.generation_config, field, CHECKED_BY_TRANSFORMERS.get(field, 0.123))
    (reason,) = not_honoured(model, PlainSlots(model), None, dict(SINGLE))
    assert reason.startswith(f"{field}=")
