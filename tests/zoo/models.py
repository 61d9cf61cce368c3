"""Tiny models, inputs for them, and their logits."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from tests.zoo.configs import tiny_config
from tests.zoo.families import model_class
from tests.zoo.weights import poisoned_empty, randomise


def tiny_model(family: str, model_type: str, seed: int = 0) -> PreTrainedModel:
    """A tiny model of `model_type` on the CPU, in fp32 and eval mode, with random weights that depend on `seed`.

    Raises `CannotBuild` with the reason where the installed Transformers has no such model.
    """
    cls = model_class(family, model_type)
    config = tiny_config(family, model_type)
    with torch.random.fork_rng(devices=[]), poisoned_empty():
        torch.manual_seed(seed)
        model = cls(config)
    randomise(model, seed)
    model.float().eval()
    return model
