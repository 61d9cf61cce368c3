"""The hollow model of a folder: the class that stock Transformers would load, without its weights."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import BertConfig, LlamaConfig, T5Config

from flashnorm.errors import ConfigError
from flashnorm.sites.build import hollow_model, model_class, read_config
from flashnorm.sites.hollow import is_hollow

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}


def test_a_config_that_is_missing_or_unknown_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"has no config\.json; give a checkpoint folder"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "never_heard_of"}))
    with pytest.raises(ConfigError, match=r"cannot be used by Transformers: .*pass --trust-remote-code"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be used by Transformers"):
        read_config(tmp_path)


def test_the_class_is_that_of_the_config_and_then_that_of_the_first_task():
    assert model_class(LlamaConfig(architectures=["LlamaModel"])).__name__ == "LlamaModel"
    assert model_class(LlamaConfig(architectures=["NotInTransformers"])).__name__ == "LlamaForCausalLM"
    assert model_class(T5Config()).__name__ == "T5ForConditionalGeneration"
    assert model_class(BertConfig()).__name__ == "BertLMHeadModel"


def test_a_config_that_no_model_can_be_built_from_is_refused():
    with pytest.raises(ConfigError, match="LlamaForCausalLM cannot be built from this config"):
        hollow_model(LlamaConfig(**{**SMALL, "hidden_act": "no_such_activation"}))


def test_large_weights_are_hollow_and_the_rest_is_finite_float32_in_eval_mode():
    model = hollow_model(LlamaConfig(**{**SMALL, "vocab_size": 100_000}, dtype="bfloat16"))
    assert is_hollow(model.model.embed_tokens.weight)
    assert not model.training
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    real = [parameter for parameter in model.parameters() if not is_hollow(parameter)]
    assert real
    assert all(bool(torch.isfinite(parameter).all()) for parameter in real)
    assert torch.get_default_dtype() == torch.float32
