"""How far a linear in eight bits may lie from its exact result, the codes taken as given; and whether codes are right.

Products of codes are exact in fp32 (e4m3: 8 significant bits) and sums of int8 products in int32. So y = s Σ cₖ wₖ + b,
s the product of both scales, errs by at most

    u |y|                          the result rounded to its dtype, and |y - b| twice where the sum is rounded first
  + (λ u₃₂ √K + 2^-20) s Σ|cₖ wₖ|  K additions in fp32, the sum of squares among them; two divisions, a root, products
  + 64 √2 · 2^-13 λ s √Σ(cₖ wₖ)²   only for e4m3 on matrix units, see below

with λ = 8 as in `flashnorm.kernels.bounds`. The last term: Hopper's matrix units align the 32 products of a step and
the sum so far to the largest of them and keep 13 bits behind its leading one (Khattak and Mikaitis, "Accurate Models of
NVIDIA Tensor Cores", 2025); the sum is moved to fp32 every 128 products (DeepSeek-AI, "DeepSeek-V3 Technical Report",
2024, section 3.3.2). What is cut off is less than 2^-13 of the sum so far, modelled as at most λ √128 times the root
mean square p of the products; its sign is the product's, so that K cuts add up to at most λ √K of that, in all
2^-13 · λ √K · λ √128 p = 64 √2 · 2^-13 λ √Σ(cₖ wₖ)².
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashnorm.kernels.bounds import CONFIDENCE, Expected
from flashnorm.kernels.codes import LARGEST, LEAST, half_step


def expected_rms_linear_w8a8(
    x: Tensor,
    codes: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    eps: float,
    bias: Tensor | None = None,
    *,
    matrix_units: bool = False,
    row_scale: Tensor | None = None,
) -> Expected:
    """The oracle of `rms_linear_w8a8` for the `codes` (M, K) of `x` (M, K). `matrix_units`: those of a GPU multiply.

    `row_scale`: (M, 1) where it is not the dynamic one over the RMS.
    """
    wide = x.double()
    if row_scale is None:
        magnitude = wide.abs().amax(-1, keepdim=True).clamp(min=LEAST)
        row_scale = magnitude / LARGEST[weight.dtype] * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    left, right = codes.double() * row_scale, weight.double() * weight_scale.double()[:, None]
    product = left @ right.t()
    value = product if bias is None else product + bias.double()
    unit, deep = torch.finfo(x.dtype).eps / 2, 2.0**-24
    bound = unit * (value.abs() + (0 if bias is None else product.abs()))
    bound = bound + (CONFIDENCE * deep * x.shape[-1] ** 0.5 + 2.0**-20) * (left.abs() @ right.abs().t())
    if matrix_units and weight.dtype != torch.int8:
        spread = (left.square() @ right.square().t()).sqrt()
        bound = bound + 64 * 2**0.5 * 2.0**-13 * CONFIDENCE * spread
    return Expected(value, bound + torch.finfo(x.dtype).smallest_normal * unit)


def codes_exceed(x: Tensor, codes: Tensor) -> float:
    """The largest distance of `codes` (M, K) from the quotients of finite `x` (M, K), in half steps; right up to 1."""
    wide = x.double()
    magnitude = wide.abs().amax(-1, keepdim=True).clamp(min=LEAST)
    return quotients_exceed(wide / magnitude * LARGEST[codes.dtype], codes)


def quotients_exceed(quotient: Tensor, codes: Tensor, rounded: float = 2.0**-21) -> float:
    """The same for quotients (M, K) in fp64. `rounded`: how far, of itself, arithmetic in fp32 may move a quotient."""
    allowed = half_step(quotient, codes.dtype) + rounded * quotient.abs()
    error = (codes.double() - quotient).abs() / allowed
    return torch.where(error.isnan(), float("inf"), error).max().item()
