"""A config whose architectures and model_type name different models: loaders would build another one than is folded."""

from __future__ import annotations

import pytest
from transformers import AutoModelForCausalLM, GemmaConfig, LlamaConfig

from flashnorm.errors import ConfigError
from flashnorm.sites.build import model_class


@pytest.mark.parametrize(
    ("config", "architecture"), [(LlamaConfig, "GemmaForCausalLM"), (GemmaConfig, "LlamaForCausalLM")]
)
def test_a_contradiction_is_refused(config, architecture):
    with pytest.raises(ConfigError, match=f"architectures name {architecture}, and its model_type is"):
        model_class(config(architectures=[architecture]))


def test_a_model_type_may_be_built_by_another_types_class():
    mapping = AutoModelForCausalLM._model_mapping
    borrowed = {config: mapping[config] for config in mapping if not issubclass(config, mapping[config].config_class)}
    assert borrowed
    for kind, model in borrowed.items():
        config = kind.__new__(kind)  # without its settings: some kinds have no defaults
        config.__dict__["architectures"] = [model.__name__]
        assert model_class(config) is model


@pytest.mark.parametrize("architectures", [["LlamaForCausalLM"], ["NoSuchModel"], [1], None])
def test_what_agrees_or_says_nothing_goes_by_the_model_type(architectures):
    config = LlamaConfig()
    config.__dict__["architectures"] = architectures  # some versions of Transformers would check its type
    assert model_class(config).__name__ == "LlamaForCausalLM"
