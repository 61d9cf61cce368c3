"""Builds the hollow model of a checkpoint folder: its real code and its real config, no weights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

from flashnorm.errors import ConfigError
from flashnorm.folders import require_folder
from flashnorm.sites.hollow import hollow_construction, settle_values

_AUTO_CLASSES = (
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForSeq2SeqLM",
    "AutoModelForMaskedLM",
    "AutoModel",
)


def read_config(folder: str | os.PathLike[str], trust_remote_code: bool = False) -> Any:
    """The folder's config as an object. Raises `ConfigError` where it is missing, invalid or of an unknown kind, and
    `CheckpointError` where there is no folder."""
    require_folder(folder)
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise ConfigError(f"{path} has no config.json; give a checkpoint folder as written by `save_pretrained`")
    try:
        return transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # the config class may raise anything; all of it means that the config is unusable
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        remedy = (
            ""
            if trust_remote_code
            else "; if the folder brings its own code and you trust it, pass --trust-remote-code"
        )
        raise ConfigError(f"{path / 'config.json'} cannot be used by Transformers: {first_line}{remedy}") from error


def model_class(config: Any, trust_remote_code: bool = False) -> Any:
    """The class that stock Transformers would load: `config.architectures` first, then the tasks in a fixed order.

    Returns something with `from_pretrained` and either `_from_config` or `from_config`.
    """
    remote = getattr(config, "auto_map", None) or {}
    if trust_remote_code and remote:
        for name in _AUTO_CLASSES:
            if name in remote:
                return getattr(transformers, name)
    for name in getattr(config, "architectures", None) or ():
        found = getattr(transformers, name, None) if isinstance(name, str) else None
        if found is None:
            continue
        wanted = _config_class(found)
        if wanted is not None and not isinstance(config, wanted) and found not in _built_for(config):
            raise ConfigError(
                f"config.json contradicts itself: its architectures name {name}, and its model_type is "
                f"{config.model_type!r}, for which loaders build another model; correct one of the two"
            )
        return found
    for name in _AUTO_CLASSES:
        auto = getattr(transformers, name)
        if type(config) in auto._model_mapping:
            return auto._model_mapping[type(config)]
    raise ConfigError(f"Transformers has no model class for the model_type {config.model_type!r}")


def _built_for(config: Any) -> list[Any]:
    """Every class that some auto class builds for the config's model_type; a few are made for another config class."""
    found: list[Any] = []
    for name in dir(modeling_auto):
        mapping = getattr(getattr(modeling_auto, name), "_model_mapping", None)
        if mapping is not None and type(config) in mapping:
            classes = mapping[type(config)]
            found += classes if isinstance(classes, tuple) else (classes,)
    return found


def _config_class(model: Any) -> Any:
    """The config class that a model class is made for; None where it does not say."""
    try:
        return getattr(model, "config_class", None)
    except ImportError as error:  # a stand-in for a class whose needs are not installed
        raise ConfigError(" ".join(str(error).split())) from error


def hollow_model(config: Any, trust_remote_code: bool = False) -> transformers.PreTrainedModel:
    """The model of `config`, hollow, float32, in eval mode. Raises `ConfigError` where it cannot be constructed."""
    cls = model_class(config, trust_remote_code)
    cls = cls[0] if isinstance(cls, tuple) else cls
    try:
        with hollow_construction(), _float32():
            if hasattr(cls, "from_config"):
                model = cls.from_config(config, trust_remote_code=trust_remote_code)
            else:
                model = cls(config)
    except Exception as error:  # model constructors are third-party code and may raise anything
        raise ConfigError(
            f"{cls.__name__} cannot be built from this config: {type(error).__name__}: {error}"
        ) from error
    model = model.float().eval()
    settle_values(model)
    return model


@contextmanager
def _float32() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
