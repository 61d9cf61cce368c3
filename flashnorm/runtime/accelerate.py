"""`flashnorm.accelerate`: the same model object, faster."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from flashnorm.errors import Refusal
from flashnorm.runtime.level_one import apply_level_one, undo_level_one
from flashnorm.runtime.replace import Replaced
from flashnorm.runtime.report import Acceleration

Model = TypeVar("Model", bound=nn.Module)


class _Unaccelerate:
    """`model.unaccelerate`. An object, not a method, so that a copied or pickled model has its own."""

    def __init__(self, model: nn.Module, replaced: list[Replaced]) -> None:
        self._model, self._replaced = model, replaced

    def __call__(self) -> nn.Module:
        """Restore the original modules, and return the model."""
        undo_level_one(self._model, self._replaced)
        for name in ("acceleration", "unaccelerate"):
            del self._model.__dict__[name]
        return self._model


def accelerate(model: Model, *, max_batch: int = 8, max_length: int | None = None, level: int | None = None) -> Model:
    """Make a loaded model faster, in place, for inference; `model.acceleration` says what was done and what was not.

    Level one works on any architecture: RMSNorms move into the linears that read them, and linears that read one tensor
    become one product. Every site is compared with norm and linear in float64 on a probe, before and after; what
    differs stays stock. No weight is changed or duplicated. `model.unaccelerate()` restores the original modules.

    `level`: 1, or None for the highest there is. `max_batch`, `max_length`: bounds of what a level allocates in
    advance; level one allocates nothing and takes any batch and length.

    Returns `model`. Raises `Refusal`, with nothing changed, where an argument or the model's state is not acceptable,
    and what `flashnorm.audit` raises.
    """
    if level not in (None, 1):
        raise Refusal(f"level={level!r} does not exist; use level=1, or None for the highest level")
    if max_batch < 1 or (max_length is not None and max_length < 1):
        raise Refusal(f"max_batch={max_batch} and max_length={max_length} must be at least 1")
    if hasattr(model, "acceleration"):
        raise Refusal("the model is accelerated already; call model.unaccelerate() first")
    if model.training:
        raise Refusal(
            "the model is in training mode, and an accelerated model has no backward; call model.eval() first"
        )
    done = apply_level_one(model)
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    model.__dict__["acceleration"] = Acceleration(kind, 1, done.sites)
    model.__dict__["unaccelerate"] = _Unaccelerate(model, done.replaced)
    return model
