"""Tiny configs: a config class' own defaults, shrunk by the rules for field names, every kind of layer kept."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from transformers import PretrainedConfig

from tests.zoo import quirks, rules
from tests.zoo.families import config_class, model_class

_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def tiny_config(family: str, model_type: str) -> PretrainedConfig:
    """The config of the tiny model of `model_type`; raises `CannotBuild` with the reason where there is none."""
    cls = config_class(model_type)
    config = shrink(cls, overrides=quirks.CONFIG.get(model_type, {}), causal=family == "causal")
    wanted = getattr(model_class(family, model_type), "config_class", cls)
    text = getattr(config, "text_config", None)
    # AutoModelForCausalLM builds the language model alone where a type is registered with its whole config.
    return text if not isinstance(config, wanted) and isinstance(text, wanted) else config


def shrink(
    cls: type[PretrainedConfig],
    *,
    base: PretrainedConfig | None = None,
    overrides: dict[str, Any] | None = None,
    causal: bool = False,
) -> PretrainedConfig:
    """An instance of `cls` with small sizes.

    `base` is the instance that a composite config makes of `cls` by default; `overrides` win over every rule, and
    a dict given for a sub-config overrides that sub-config's fields.
    """
    default = cls()
    base = default if base is None else base
    overrides = dict(overrides or {})
    kwargs = {k: getattr(base, k) for k in _fields(cls) if _differs(getattr(base, k), getattr(default, k))}
    kwargs |= _small_values(cls, base, causal=causal)
    kwargs |= _layer_lists(cls, base, overrides)
    if (rope := _rope(base, kwargs | overrides)) is not None:
        kwargs["rope_parameters"] = rope
    for name in getattr(cls, "sub_configs", {}):
        sub = getattr(base, name, None)
        given = overrides.get(name)
        if isinstance(given, PretrainedConfig) or not isinstance(sub, PretrainedConfig):
            continue
        kwargs[name] = shrink(type(sub), base=sub, overrides=overrides.pop(name, {}))
    return cls(**(kwargs | overrides))


def _fields(cls: type[PretrainedConfig]) -> dict[str, dataclasses.Field]:
    inherited = {f.name for f in dataclasses.fields(PretrainedConfig)}
    return {f.name: f for f in dataclasses.fields(cls) if f.name not in inherited}


def _differs(a: Any, b: Any) -> bool:
    if isinstance(a, PretrainedConfig):
        return False
    return bool(a != b)


def _small_values(cls: type[PretrainedConfig], base: PretrainedConfig, *, causal: bool) -> dict[str, Any]:
    fields = _fields(cls)
    tower = "vocab_size" not in fields
    values: dict[str, Any] = {}
    for index, (name, field) in enumerate(fields.items()):
        current = getattr(base, name)
        small = rules.TOWER_VALUES.get(name) if tower else None
        if small is None:
            small = rules.VALUES.get(name)
        if small is not None and not (field.default is None and name in rules.OPTIONAL):
            values[name] = _like(current, small)
        elif (token := rules.token_id(name, current, index)) is not None:
            values[name] = token
    if causal and "is_decoder" in fields:
        values["is_decoder"] = True
    return values


def _like(current: Any, small: Any) -> Any:
    """`small` in the shape of `current`: a pair or list keeps its length, zero and booleans stay."""
    if isinstance(current, (list, tuple)) and not isinstance(small, (list, tuple)):
        return type(current)(small for _ in current)
    return current if isinstance(current, bool) else small


def _layer_lists(cls: type[PretrainedConfig], base: PretrainedConfig, overrides: dict[str, Any]) -> dict[str, Any]:
    """Per-layer lists cut to one layer of each kind, in order of first appearance, and the layer count to match."""
    count_name = next((n for n in _LAYER_COUNTS if n in _fields(cls)), None)
    if count_name is None or count_name in overrides:
        return {}
    count = getattr(base, count_name)
    lists = {
        name: value
        for name in _fields(cls)
        if isinstance(value := getattr(base, name), (list, tuple)) and len(value) == count and name not in overrides
    }
    if not lists or not isinstance(count, int):
        return {}
    kinds: dict[str, int] = {}
    for layer in range(count):
        kinds.setdefault(repr([value[layer] for value in lists.values()]), layer)
    chosen = sorted(kinds.values())
    chosen += chosen[:1] * (2 - len(chosen))
    picked = {name: type(value)(value[i] for i in chosen) for name, value in lists.items()}
    return {count_name: len(chosen)} | picked


def _rope(base: PretrainedConfig, kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """The rope parameters with multimodal sections scaled to the small head; None where there are none to scale."""
    rope = getattr(base, "rope_parameters", None)
    if not isinstance(rope, dict) or "mrope_section" not in rope:
        return None
    head_dim = kwargs.get("head_dim") or kwargs["hidden_size"] // kwargs["num_attention_heads"]
    half = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
    sections = [max(1, n * half // sum(rope["mrope_section"])) for n in rope["mrope_section"]]
    sections[0] += half - sum(sections)
    return copy.deepcopy(rope) | {"mrope_section": sections}
