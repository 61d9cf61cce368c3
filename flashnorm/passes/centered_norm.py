"""A LayerNorm whose input has no mean any more."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from flashnorm import algebra
from flashnorm.passes.stand_in import StandIn
from flashnorm.sites.probing import NormProbe


class CenteredNorm(StandIn):
    """The RMSNorm that stands in the place of a LayerNorm, with its gain, epsilon and bias.

    `without_bias`: the bias has moved into the next layers, and is no parameter any more.
    """

    def __init__(self, norm: nn.Module, probe: NormProbe, without_bias: bool = False) -> None:
        super().__init__(norm, replace(probe, convention=replace(probe.convention, subtracts_mean=False)))
        if without_bias and self.bias_name is not None:
            delattr(self, self.bias_name)
            self.bias_name = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x`: (..., width). Returns its shape and dtype."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return self._with_gain(algebra.rms_norm(wide, self.convention.eps), x.dtype)
