"""Eight-bit codes of the rows of a matrix: e4m3 floats or integers, with one scale a row (plain torch).

A row v with the largest magnitude a is stored as codes c = round(v · L/a) and the scale s = a/L, where L is the largest
code, so that v ≈ s c. Rounding is to nearest, ties to even.

**Why the norm is free here.** The codes of v and of v/r are the same for any positive r, because a/r is the largest
magnitude of v/r: only the scale differs, s/r. So RMSNorm of a row that is quantised anyway costs no pass of its own:
1/RMS is one factor of the row's scale. In fp32 the quotients v L/a and (v/r) L/(a/r) differ by a few roundings, so that
codes can differ, by one step, only where the quotient lies within 2^-21 of itself from the middle between two codes.

`LEAST` is the least magnitude for a: with it, L/a is finite and a/L a normal number. Rows below lose accuracy
gradually, down to codes of zero; with an epsilon from 1e-12 up, their normed values are below 1e-29.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from flashnorm.errors import DtypeError, ShapeError

LARGEST: MappingProxyType[torch.dtype, float] = MappingProxyType({torch.float8_e4m3fn: 448.0, torch.int8: 127.0})
LEAST = 2.0**-117


class QuantizedWeight(NamedTuple):
    """Codes (N, K) in e4m3 or int8, and the scale of each row, (N,) fp32. The weight ≈ codes · scale[:, None]."""

    codes: Tensor
    scale: Tensor


def quantize_weight(weight: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> QuantizedWeight:
    """The weight of a linear, (N, K) of any floating dtype, as codes of `dtype` with one symmetric scale per output.

    `dtype`: `torch.float8_e4m3fn` or `torch.int8`. Fold the norm's gain first. A row that holds a NaN or an infinity
    gets the scale NaN. Raises `ShapeError` or `DtypeError`.
    """
    if weight.dim() != 2:
        raise ShapeError(f"weight must be a matrix (N, K), not of shape {tuple(weight.shape)}")
    if not weight.is_floating_point() or weight.itemsize == 1:
        raise DtypeError(f"weight is {weight.dtype}; quantise one in bfloat16, float16, float32 or float64")
    if dtype not in LARGEST:
        raise DtypeError(f"weights are quantised to float8_e4m3fn or int8, not to {dtype}")
    codes, scale = quantize_rows(weight.detach(), dtype)
    return QuantizedWeight(codes, torch.where(scale.isfinite(), scale, torch.nan))


def quantize_rows(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes (M, K) and scales (M,) fp32 of `rows` (M, K), K > 0. Arithmetic in fp32."""
    wide, largest = rows.float(), LARGEST[dtype]
    magnitude = wide.abs().amax(-1).clamp(min=LEAST)
    quotient = wide * (largest / magnitude)[:, None]
    if dtype == torch.int8:
        quotient = quotient.round()
    return quotient.to(dtype), magnitude / largest


def half_step(quotient: Tensor, dtype: torch.dtype) -> Tensor:
    """Half the distance between the codes around each `quotient`: how far rounding to nearest may move it."""
    if dtype == torch.int8:
        return torch.full_like(quotient, 0.5)
    return torch.ldexp(torch.ones_like(quotient), torch.frexp(quotient)[1].clamp(min=-5) - 5)
