"""Every causal language model of the installed Transformers, shortened to what an audit has to see of it."""

from __future__ import annotations

import re
from typing import Any

import transformers
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from flashnorm.errors import ConfigError
from flashnorm.sites.build import hollow_model

_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "decoder_layers", "encoder_layers")
_FEWEST = 2
# What lists are called that say which layers are of a kind by their numbers. Other lists of small numbers are sizes.
_NUMBERED = re.compile(r"layer|index|idx")


def causal_types() -> list[str]:
    """The model types, in alphabetical order."""
    return sorted(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in CONFIG_MAPPING)


def short_model(model_type: str) -> PreTrainedModel:
    """The hollow causal model of the type's default config, cut to one layer of each kind, and two at least.

    Which kinds there are is what lists with one entry for each layer say, and lists of the numbers of layers. A model
    that cannot be cut is built whole.
    Raises `ConfigError` where the type has no defaults, or no model can be built of them.
    """
    whole = _default(model_type)
    try:
        short = type(whole)(**_shortened(whole))
        short.architectures = whole.architectures
        return hollow_model(short)
    except Exception:  # config classes may raise anything; their own validation knows best what goes together
        return hollow_model(whole)


def _default(model_type: str) -> Any:
    """The default config that the type's causal model is made for: of some types, that of their text part."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, "")
    try:
        config = CONFIG_MAPPING[model_type]()
        wanted = getattr(getattr(transformers, name), "config_class", None) or type(config)
        parts = (getattr(config, part, None) for part in config.sub_configs)
        config = config if isinstance(config, wanted) else next((p for p in parts if isinstance(p, wanted)), config)
    except Exception as error:  # config classes may raise anything
        raise ConfigError(f"{model_type} has no default config: {type(error).__name__}: {error}") from error
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    config.architectures = [name]
    return config


def _shortened(config: PretrainedConfig) -> dict[str, Any]:
    """The arguments of a config with few layers, and so of the configs of its parts."""
    values = config.to_diff_dict()
    name = next((name for name in _COUNTS if isinstance(getattr(config, name, None), int)), None)
    count = getattr(config, name) if name else 0
    if name and count > _FEWEST:
        found = {k: v for k, v in config.to_dict().items() if isinstance(v, (list, tuple))}
        numbered = {k: v for k, v in found.items() if _are_layers(k, v, count)}
        lists = {k: v for k, v in found.items() if len(v) == count and k not in numbered}
        kept = _one_of_each([*lists.values(), *([n in v for n in range(count)] for v in numbered.values())], count)
        values |= {k: [v[layer] for layer in kept] for k, v in lists.items()}
        values |= {k: [place for place, layer in enumerate(kept) if layer in v] for k, v in numbered.items()}
        values |= {k: len(kept) for k in _COUNTS if isinstance(getattr(config, k, None), int) and k not in ("depth",)}
        values[name] = len(kept)
    for part in config.sub_configs:
        inner = getattr(config, part, None)
        if isinstance(inner, PretrainedConfig):
            values[part] = _shortened(inner)
    return values


def _one_of_each(lists: list[Any], count: int) -> list[int]:
    """The first layer of each kind, and as many others as make `_FEWEST`, in order. `lists`: entries for each layer."""
    kinds: dict[str, int] = {}
    for layer in range(count):
        kinds.setdefault(repr([entries[layer] for entries in lists]), layer)
    kept = list(kinds.values())
    kept += [n for n in range(count) if n not in kept][: max(0, _FEWEST - len(kept))]
    return sorted(kept)


def _are_layers(name: str, values: Any, count: int) -> bool:
    """Whether a config's list holds the numbers of some of its `count` layers, each once and in order."""
    numbers = all(type(value) is int and 0 <= value < count for value in values)
    return numbers and bool(_NUMBERED.search(name)) and list(values) == sorted(set(values))
