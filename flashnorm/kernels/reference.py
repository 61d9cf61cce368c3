"""Plain-torch references: what each operation computes, on any device and without Triton.

Arithmetic is in fp32 (fp64 for fp64 operands) and rounded once, to the dtype of x, so that a product too large for
fp16 before the scale does no harm.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flashnorm.kernels.codes import quantize_rows

ACTIVATIONS: MappingProxyType[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"silu": F.silu, "gelu_tanh": lambda t: F.gelu(t, approximate="tanh"), "relu": F.relu}
)


class WithSumsq(NamedTuple):
    """A new residual stream (..., N) and the sum of squares of each of its rows (...,), fp32 or fp64."""

    value: Tensor
    sumsq: Tensor


def rms_linear(x: Tensor, weight: Tensor, eps: float, gain: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """y = ((x ⊙ gain) Wᵀ) / RMS(x) + bias. `x`: (..., K), `weight`: (N, K). Returns (..., N) in `x.dtype`."""
    return _wide_rms_linear(x, weight, eps, gain, bias).to(x.dtype)


def rms_swiglu_linear(
    x: Tensor, gate_up_weight: Tensor, eps: float, gain: Tensor | None = None, activation: str = "silu"
) -> Tensor:
    """act(gate) ⊙ up of y = RMSNorm(x) [gate; up]ᵀ. `gate_up_weight`: (2N, K), gate first. Returns (..., N)."""
    gate, up = _wide_rms_linear(x, gate_up_weight, eps, gain, None).chunk(2, dim=-1)
    return (ACTIVATIONS[activation](gate) * up).to(x.dtype)


def linear_residual(x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None = None) -> WithSumsq:
    """residual + x Wᵀ + bias, with the sum of squares that the next norm needs. `residual`: (..., N)."""
    wide = _wide(x)
    value = x.to(wide) @ weight.to(wide).t() + residual.to(wide)
    return _with_sumsq((value if bias is None else value + bias.to(wide)).to(x.dtype))


def add_sumsq(x: Tensor, residual: Tensor) -> WithSumsq:
    """residual + x, with the sum of squares that the next norm needs. Both (..., N)."""
    return _with_sumsq((x.to(_wide(x)) + residual).to(x.dtype))


def rms_linear_w8a8(x: Tensor, weight: Tensor, weight_scale: Tensor, eps: float, bias: Tensor | None = None) -> Tensor:
    """y = (codes(x) Wᵀ) · scale(x)/RMS(x) · weight_scale + bias. `x`: (M, K), `weight`: codes (N, K). Gives (M, N)."""
    codes, scale = quantize_rows(x, weight.dtype)
    scale = scale * torch.rsqrt(x.float().square().mean(-1) + eps)
    if weight.dtype == torch.int8 and x.device.type == "cpu":
        products = torch._int_mm(codes, weight.t()).float()
    else:
        products = codes.float() @ weight.float().t()
    value = products * (scale[:, None] * weight_scale)
    return (value if bias is None else value + bias.float()).to(x.dtype)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _with_sumsq(value: Tensor) -> WithSumsq:
    """The sum is that of the rounded values, which are what the next layer reads."""
    return WithSumsq(value, value.to(_wide(value)).square().sum(-1))


def _wide_rms_linear(x: Tensor, weight: Tensor, eps: float, gain: Tensor | None, bias: Tensor | None) -> Tensor:
    wide = x.to(_wide(x))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    scaled = wide if gain is None else wide * gain.to(wide.dtype)
    product = (scaled @ weight.to(wide.dtype).t()) * scale
    return product if bias is None else product + bias.to(wide.dtype)
