"""Weights that the config asks for and no file stores: a loader would set them at random, with a warning at most."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from transformers import PreTrainedModel

from flashnorm.errors import CheckpointError
from flashnorm.sites.tying import tied_groups

_SHOWN = 3


def refuse_missing(folder: Path, model: PreTrainedModel, found: Collection[str]) -> None:
    """Raise `CheckpointError` where `model` holds a weight that is not loaded from any stored tensor.

    `found`: the parameters and buffers that stored tensors go to. Excepted, as by the loader: what is tied to one that
    is found, what the model's classes compute themselves (`_keys_to_ignore_on_load_missing`), and buffers that are
    never stored.
    """
    absent = missing_weights(model, found)
    if absent:
        names = ", ".join(absent[:_SHOWN]) + (f" and {len(absent) - _SHOWN} more" if len(absent) > _SHOWN else "")
        raise CheckpointError(
            f"{folder} stores no tensor for {names}, which its config.json asks for ({type(model).__name__}), so "
            "loaders would set what is missing at random; correct the config, or download the checkpoint again"
        )


def missing_weights(model: PreTrainedModel, found: Collection[str]) -> list[str]:
    """The names in the `state_dict` of `model` that a loader would report as missing, in the model's order."""
    tied = {name: group for group in tied_groups(model) for name in group}
    patterns = model._keys_to_ignore_on_load_missing or ()
    computed = re.compile("|".join(f"({pattern})" for pattern in patterns)) if patterns else None
    return [
        name
        for name in model.state_dict()
        if not any(other in found for other in tied.get(name, (name,)))
        and not (computed is not None and computed.search(name))
    ]
