"""`flashnorm.accelerate`: the same model object, faster."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import nn

from flashnorm.errors import CapacityError, Refusal, Unsupported
from flashnorm.runtime.decode.spec import Spec
from flashnorm.runtime.level_one import apply_level_one, undo_level_one
from flashnorm.runtime.level_two import LevelTwo, spec_of
from flashnorm.runtime.replace import Replaced
from flashnorm.runtime.report import Acceleration

Model = TypeVar("Model", bound=nn.Module)


class _Unaccelerate:
    """`model.unaccelerate`. An object, not a method, so that a copied or pickled model has its own."""

    def __init__(self, model: nn.Module, replaced: list[Replaced], level_two: LevelTwo | None) -> None:
        self._model, self._replaced, self._level_two = model, replaced, level_two

    def __call__(self) -> nn.Module:
        """Restore the original modules, and return the model. Raises `Refusal` where that was done before."""
        if self._model.__dict__.get("unaccelerate") is not self:
            raise Refusal("the model is not accelerated any more: unaccelerate was called before")
        if self._level_two is not None:
            self._level_two.undo()
        undo_level_one(self._model, self._replaced)
        for name in ("acceleration", "unaccelerate"):
            del self._model.__dict__[name]
        return self._model


def accelerate(model: Model, *, max_batch: int = 8, max_length: int | None = None, level: int | None = None) -> Model:
    """Make a loaded model faster, in place, for inference; `model.acceleration` says what was done and what was not.

    Level one works on any architecture: RMSNorms move into the linears that read them, and linears that read one tensor
    become one product. Every site is compared with norm and linear in float64 on a probe, before and after; what
    differs stays stock. No weight is changed or duplicated. `model.unaccelerate()` restores the original modules.

    `level`: 1, or 2, for decoder-only language models: `model.generate` then runs steps of a decode program that reads
    the same weights, with `max_batch` sequences of `max_length` tokens (default: what the model allows, at most 4096)
    in a cache allocated here; other arguments of `generate` than the program knows run on level one, with a warning.
    Level one allocates nothing and takes any batch and length. None (default): on a CUDA device 2 where that can be,
    and else 1, for a reason that `model.acceleration.program` gives; on other devices 1.

    Returns `model`. Raises, with nothing changed, `Refusal` where an argument or the model's state is not acceptable,
    `Unsupported` where level two cannot run the model, `CapacityError` where the cache does not fit, and what
    `flashnorm.audit` raises.
    """
    _require_arguments(level, max_batch, max_length)
    _require_model(model)
    with torch.inference_mode(False), _host_by_default():  # observing counts writes, which inference tensors do not
        tried = level is None and _on_gpu(model)
        spec, why = _spec(model, max_length, tried) if tried or level == 2 else (None, "")  # of the stock model
        done = apply_level_one(model)
        try:
            level_two, why = (None, why) if spec is None else _level_two(model, spec, max_batch, tried)
        except BaseException:
            undo_level_one(model, done.replaced)
            raise
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    reached = 1 if level_two is None else 2
    model.__dict__["acceleration"] = Acceleration(
        kind, reached, done.sites, why if level_two is None else level_two.described
    )
    model.__dict__["unaccelerate"] = _Unaccelerate(model, done.replaced, level_two)
    return model


def _on_gpu(model: nn.Module) -> bool:
    return any(parameter.device.type == "cuda" for parameter in model.parameters())


def _spec(model: nn.Module, max_length: int | None, tried: bool) -> tuple[Spec | None, str]:
    """What the model computes; or, where level two was `tried` rather than asked for, why it cannot be."""
    try:
        return spec_of(model, max_length), ""
    except Unsupported as error:
        if not tried:
            raise
        return None, f"not level 2: {error}"


def _level_two(model: nn.Module, spec: Spec, max_batch: int, tried: bool) -> tuple[LevelTwo | None, str]:
    try:
        return LevelTwo(model, spec, max_batch=max_batch), ""
    except CapacityError as error:
        if not tried:
            raise
        return None, f"not level 2: {error}"


def _host_by_default() -> AbstractContextManager[object]:
    """Probes are made on the host, whatever `torch.set_default_device` says, and moved to the model."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


def _require_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise Refusal(f"accelerate takes a loaded model, a torch module, and not {model!r}; load it first")
    if isinstance(model, torch._dynamo.OptimizedModule):
        raise Refusal("the model is compiled already; accelerate the model first, and compile what comes back")
    if hasattr(model, "acceleration"):
        raise Refusal("the model is accelerated already; call model.unaccelerate() first")
    if model.training:
        raise Refusal(
            "the model is in training mode, and an accelerated model has no backward; call model.eval() first"
        )
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise Refusal("the weights were made inside torch.inference_mode(), and cannot be merged; load them outside it")


def _require_arguments(level: object, max_batch: object, max_length: object) -> None:
    if level is not None and (type(level) is not int or level not in (1, 2)):
        raise Refusal(f"level={level!r} does not exist; use level=1 or level=2")
    for name, value in (("max_batch", max_batch), ("max_length", 1 if max_length is None else max_length)):
        if type(value) is not int or value < 1:
            raise Refusal(f"{name}={value!r} must be a whole number, at least 1")
