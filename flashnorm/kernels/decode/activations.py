"""Activations inside kernels, in fp32."""

from __future__ import annotations

from types import MappingProxyType

import triton
import triton.language as tl

from flashnorm.kernels.decode.reference import ACTIVATIONS

NUMBERS = MappingProxyType({name: number for number, name in enumerate(ACTIVATIONS)})


@triton.jit
def activate(x, NUMBER: tl.constexpr):
    """The activation that `NUMBERS` gives this number; x: fp32."""
    if NUMBER == 0:
        x = x / (1 + tl.exp(-x))
    elif NUMBER == 1:  # x/2 (1 + tanh u) = x / (1 + exp(-2u)), u = sqrt(2/pi) (x + 0.044715 x³)
        x = x / (1 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif NUMBER == 2:
        x = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    else:
        x = tl.where(x < 0, 0.0, x)  # keeps a NaN
        if NUMBER == 4:
            x = x * x
    return x
