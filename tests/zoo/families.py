"""The families of model types that the installed Transformers knows, and the class that builds each."""

from __future__ import annotations

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

MAPPINGS = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "image_text": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
}


class CannotBuild(Exception):
    """The installed Transformers cannot build this type from a config alone; the message is the reason."""


def model_types(family: str) -> list[str]:
    """Every model type of `family`, in alphabetical order."""
    return sorted(MAPPINGS[family])


def model_class(family: str, model_type: str) -> type[PreTrainedModel]:
    """The class that `AutoModelFor...` of this family builds for `model_type`; the first of several."""
    names = MAPPINGS[family][model_type]
    name = names if isinstance(names, str) else names[0]
    found = getattr(transformers, name, None)
    if found is None:
        raise CannotBuild(f"transformers has no class {name}")
    if not issubclass(found, torch.nn.Module):
        raise CannotBuild(f"{name} needs an optional dependency: {', '.join(getattr(found, '_backends', []))}")
    return found


def config_class(model_type: str) -> type[PretrainedConfig]:
    """The config class registered for `model_type`."""
    try:
        return CONFIG_MAPPING[model_type]
    except KeyError:
        raise CannotBuild(f"no config class is registered for {model_type}") from None
