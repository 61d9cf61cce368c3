"""Tiny configs: a config class' own defaults, shrunk by the rules for field names, every kind of layer kept."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from transformers import PretrainedConfig

from tests.zoo import quirks, rules
from tests.zoo.families import config_class, model_class

_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth")
_LAYER_KINDS = ("layer_types", "layers_block_type", "mlp_layer_types")


def tiny_config(family: str, model_type: str) -> PretrainedConfig:
    """The config of the tiny model of `model_type`; raises `CannotBuild` with the reason where there is none."""
    cls = config_class(model_type)
    wanted = getattr(model_class(family, model_type), "config_class", cls)
    if issubclass(cls, wanted):
        return shrink(cls, causal=family == "causal")
    # The type is registered with its whole config, but its class in this family reads one part of it.
    base = _default(cls)
    parts = (getattr(base, name, None) for name in cls.sub_configs)
    part = next((part for part in parts if isinstance(part, wanted)), base)
    return shrink(type(part), base=part, causal=family == "causal")


def shrink(
    cls: type[PretrainedConfig],
    *,
    base: PretrainedConfig | None = None,
    overrides: dict[str, Any] | None = None,
    causal: bool = False,
) -> PretrainedConfig:
    """An instance of `cls` with small sizes.

    `base` is the instance that a composite config makes of `cls` by default. `overrides` win over the quirks of
    the type, which win over the rules; a dict given for a sub-config overrides that sub-config's fields.
    """
    overrides = copy.deepcopy(quirks.CONFIG.get(cls.model_type, {}) | (overrides or {}))
    default = _default(cls)
    base = default if base is None else base
    fields = _fields(cls)
    current = {name: _value(base, field) for name, field in fields.items()}
    kwargs = {name: value for name, value in current.items() if _differs(value, _value(default, fields[name]))}
    kwargs |= _small_values(current, fields, causal=causal)
    kwargs |= _layer_lists(current | overrides, given=overrides)
    if (rope := _rope(current, kwargs | overrides)) is not None:
        kwargs["rope_parameters"] = rope
    for name in cls.sub_configs:
        if isinstance(sub := getattr(base, name, None), PretrainedConfig):
            part = shrink(type(sub), base=sub, overrides=overrides.get(name))
            kwargs[name] = part.to_dict() if cls.model_type in quirks.PARTS_AS_DICTS else part
    return cls(**(kwargs | {name: value for name, value in overrides.items() if name not in cls.sub_configs}))


def _default(cls: type[PretrainedConfig]) -> PretrainedConfig:
    return cls(**copy.deepcopy(quirks.REQUIRED.get(cls.model_type, {})))


def _fields(cls: type[PretrainedConfig]) -> dict[str, dataclasses.Field]:
    inherited = {f.name for f in dataclasses.fields(PretrainedConfig)}
    return {f.name: f for f in dataclasses.fields(cls) if f.name not in inherited}


def _value(config: PretrainedConfig, field: dataclasses.Field) -> Any:
    try:
        return getattr(config, field.name)
    except RuntimeError:  # a heterogeneous config refuses to name one value for fields that differ by layer
        return field.default


def _differs(a: Any, b: Any) -> bool:
    return not isinstance(a, PretrainedConfig) and bool(a != b)


def _small_values(current: dict[str, Any], fields: dict[str, dataclasses.Field], *, causal: bool) -> dict[str, Any]:
    tower = "vocab_size" not in fields
    values: dict[str, Any] = {}
    for index, (name, value) in enumerate(current.items()):
        small = rules.TOWER_VALUES.get(name) if tower else None
        small = rules.VALUES.get(name) if small is None else small
        if small is not None and not (value is None and name in rules.OPTIONAL):
            values[name] = _like(value, small)
        elif (token := rules.token_id(name, value, index)) is not None:
            values[name] = token
    if "kv_lora_rank" in fields and "num_key_value_heads" in fields:
        values["num_key_value_heads"] = rules.HEADS  # latent attention makes a key for every query head
    if causal and "is_decoder" in fields:
        values["is_decoder"] = True
    return values


def _like(current: Any, small: Any) -> Any:
    """`small` in the shape of `current`: a pair stays a pair, a size per layer becomes one size, a boolean stays."""
    if isinstance(current, bool):
        return current
    if not isinstance(current, (list, tuple)) or len(set(map(repr, current))) == 1 < len(current) - 1:
        return small
    return [small, small] if len(current) == 2 else current


def _layer_lists(current: dict[str, Any], *, given: dict[str, Any]) -> dict[str, Any]:
    """Per-layer lists cut to one layer of each kind, in order of first appearance, and the layer count to match."""
    count_name = next((name for name in _LAYER_COUNTS if name in current), "")
    kinds_name = next((name for name in _LAYER_KINDS if isinstance(current.get(name), (list, tuple))), "")
    if count_name in given:
        return {}
    if kinds_name in given:
        return {count_name: len(given[kinds_name])} if count_name else {}
    count = len(current[kinds_name]) if kinds_name else current.get(count_name, 0)
    lists = {
        name: value
        for name, value in current.items()
        if isinstance(value, (list, tuple)) and len(value) == count and name not in given | rules.VALUES
    }
    if not lists:
        return {}
    kinds: dict[str, int] = {}
    for layer in range(count):
        kinds.setdefault(repr([value[layer] for value in lists.values()]), layer)
    chosen = sorted(kinds.values())
    chosen += chosen[:1] * (2 - len(chosen))
    picked: dict[str, Any] = {name: [value[i] for i in chosen] for name, value in lists.items()}
    return picked | ({count_name: len(chosen)} if count_name else {})


def _rope(current: dict[str, Any], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """The rope parameters with multimodal sections scaled to the small head; None where there are none to scale."""
    rope = current.get("rope_parameters")
    if not isinstance(rope, dict) or "mrope_section" not in rope:
        return None
    head_dim = (
        kwargs.get("qk_rope_head_dim")
        or kwargs.get("head_dim")
        or kwargs["hidden_size"] // kwargs["num_attention_heads"]
    )
    half = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
    sections = [max(1, n * half // sum(rope["mrope_section"])) for n in rope["mrope_section"]]
    sections[0] += half - sum(sections)
    return copy.deepcopy(rope) | {"mrope_section": sections}
