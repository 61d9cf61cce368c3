"""A norm that leaves its division to a later one, or makes up for an earlier one's, and how the scalar travels.

The scalar of a token goes from the dropped norm to those that need it beside the model's own arguments: in a context
variable, so that calls on other threads do not see it and no module holds a tensor when the call is over.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from flashnorm import algebra
from flashnorm.passes.stand_in import StandIn
from flashnorm.sites.arrangement import Arrangement
from flashnorm.sites.probing import NormProbe

_NOTHING: Mapping[Any, torch.Tensor] = MappingProxyType({})
_ON_THE_WAY: ContextVar[Mapping[Any, torch.Tensor]] = ContextVar("flashnorm_carried", default=_NOTHING)


class Carried:
    """The square of the RMS that a dropped norm did not divide by: (tokens..., 1), fp32 or fp64."""

    def __init__(self, norm: str) -> None:
        self.norm = norm

    def put(self, square: torch.Tensor) -> None:
        _ON_THE_WAY.set({**_ON_THE_WAY.get(), self: square})

    def get(self) -> torch.Tensor:
        """Raises `RuntimeError` where the dropped norm has not run: the model was called in another order."""
        square = _ON_THE_WAY.get().get(self)
        if square is None:
            raise RuntimeError(f"{self.norm}, which was dropped, has not run before what depends on it")
        return square

    def divided(self, x: torch.Tensor) -> torch.Tensor:
        """`x` (tokens..., any) divided by the RMS, in its own dtype."""
        return (x * self.get().rsqrt()).to(x.dtype)


@dataclass(frozen=True)
class Missing:
    """What the input of a later norm lacks: the division by a power of the RMS that an earlier one left out."""

    carried: Carried
    arrangement: Arrangement
    degree: int = 1

    def square(self) -> torch.Tensor:
        """The square of that power, for each row of the later norm's input: (leading axes..., 1)."""
        return self.arrangement.spread(self.carried.get()) ** self.degree


def forget(carried: Carried) -> None:
    """The call in which a scalar was needed is over."""
    _ON_THE_WAY.set({key: square for key, square in _ON_THE_WAY.get().items() if key is not carried})


class CarriedNorm(StandIn):
    """Stands in the place of `norm`, with its parameters under their names.

    `drops`: it does not divide by its RMS and sends the square of that instead. `takes`: its input lacks the division
    by a power of an earlier RMS, so its epsilon grows with the square of that (`algebra.carried_epsilon`).
    """

    def __init__(
        self,
        norm: nn.Module,
        probe: NormProbe,
        drops: Carried | None = None,
        takes: Missing | None = None,
    ) -> None:
        super().__init__(norm, probe)
        self.drops, self.takes = drops, takes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x`: (..., width). Returns its shape and dtype."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        core = algebra.center(wide) if self.convention.subtracts_mean else wide
        eps: float | torch.Tensor = self.convention.eps
        if self.takes is not None:
            eps = eps * self.takes.square()
        if self.drops is not None:
            self.drops.put(algebra.carried_epsilon(core, eps, 1.0))
        else:
            core = algebra.rms_norm(core, eps)
        return self._with_gain(core, x.dtype)
