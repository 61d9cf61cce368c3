"""Which types the zoo holds, and why the others are missing."""

from __future__ import annotations

import re

import torch
from transformers import PreTrainedModel

from tests.zoo.families import CannotBuild, model_types
from tests.zoo.inputs import forward_inputs, logits
from tests.zoo.models import tiny_model
from tests.zoo.quirks import REASONS


def build_report(family: str) -> dict[str, str]:
    """Model type to "ok", or to the reason why it cannot be built or run."""
    return {model_type: state_of(family, model_type) for model_type in model_types(family)}


def state_of(family: str, model_type: str) -> str:
    """One line of the report: builds the tiny model and runs it."""
    return working_model(family, model_type)[1]


def working_model(family: str, model_type: str) -> tuple[PreTrainedModel | None, str]:
    """The tiny model and "ok", or None and the reason why it cannot be built or run."""
    try:
        model = tiny_model(family, model_type)
        state = check(model, family)
    except (CannotBuild, ImportError) as error:
        return None, _optional_dependency(str(error)) or str(error)
    except Exception as error:  # the report's purpose: whatever a model raises is its reason
        return None, REASONS.get((family, model_type), f"{type(error).__name__}: {error}".splitlines()[0])
    return model if state == "ok" else None, state


def _optional_dependency(message: str) -> str:
    found = re.findall(r"requires the (\S+) library|No module named '(\S+)'", message)
    names = sorted({name for pair in found for name in pair if name})
    return f"needs an optional dependency: {', '.join(names)}" if names else ""


def check(model: PreTrainedModel, family: str) -> str:
    """ "ok" when `model` gives finite logits that change with its input, else what is wrong with them."""
    inputs = forward_inputs(model, family)
    before = logits(model, inputs)
    other = {k: v.flip(0) if k.endswith(("input_ids", "inputs_embeds")) else v for k, v in inputs.items()}
    if not torch.isfinite(before).all():
        return "the logits are not finite"
    if torch.allclose(before, logits(model, other)):
        return "the logits do not depend on the input"
    return "ok"
