"""`flashnorm.accelerate`: the same model object, faster."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from flashnorm.errors import Refusal
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
        """Restore the original modules, and return the model."""
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

    `level`: 1 (None means that), or 2, for decoder-only language models: `model.generate` then runs steps of a decode
    program that reads the same weights, with `max_batch` sequences of `max_length` tokens (default: what the model
    allows, at most 4096) in a cache allocated here; other arguments of `generate` than the program knows run on level
    one, with a warning. Level one allocates nothing and takes any batch and length.

    Returns `model`. Raises, with nothing changed, `Refusal` where an argument or the model's state is not acceptable,
    `Unsupported` where level two cannot run the model, `CapacityError` where the cache does not fit, and what
    `flashnorm.audit` raises.
    """
    if level not in (None, 1, 2):
        raise Refusal(f"level={level!r} does not exist; use level=1 or level=2")
    if max_batch < 1 or (max_length is not None and max_length < 1):
        raise Refusal(f"max_batch={max_batch} and max_length={max_length} must be at least 1")
    if hasattr(model, "acceleration"):
        raise Refusal("the model is accelerated already; call model.unaccelerate() first")
    if model.training:
        raise Refusal(
            "the model is in training mode, and an accelerated model has no backward; call model.eval() first"
        )
    spec = spec_of(model, max_length) if level == 2 else None  # read from the stock model
    done = apply_level_one(model)
    try:
        level_two = None if spec is None else LevelTwo(model, spec, max_batch=max_batch)
    except BaseException:
        undo_level_one(model, done.replaced)
        raise
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    model.__dict__["acceleration"] = Acceleration(
        kind, level or 1, done.sites, "" if level_two is None else level_two.described
    )
    model.__dict__["unaccelerate"] = _Unaccelerate(model, done.replaced, level_two)
    return model
