"""Where a model keeps what a decode step needs: its stack of layers, its configs, its device."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from flashnorm.errors import Unsupported


def layers_of(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The name of the model's stack of layers, and the stack. Raises `Unsupported` where there is not exactly one."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise Unsupported(f"{type(model).__name__} has no Transformers config")
    if getattr(config, "is_encoder_decoder", False):
        raise Unsupported("it is an encoder-decoder, and a decode step as one program is for decoder-only models")
    count = getattr(config.get_text_config(), "num_hidden_layers", None)
    lists = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count}
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    if len(outer) != 1:
        raise Unsupported(f"it has {len(outer)} lists of {count} layers, where a decoder-only transformer has one")
    return outer[0], lists[outer[0]]


def nested_configs(model: nn.Module) -> list[Any]:
    """The config objects that the model's modules hold, each once."""
    found = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    return list(found.values())


def device_of(model: nn.Module) -> torch.device:
    """The one device of all parameters. Raises `Unsupported` where there are several, or values are not in memory."""
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:
        raise Unsupported(f"its weights lie on {len(devices)} devices; put the model on one")
    device = devices.pop()
    if device.type == "meta":
        raise Unsupported("its weights are not in memory; load the model without offload")
    return device
