"""How far a deferred norm may lie from the exact result: a bound derived from roundings, not tuned.

Per output y = Σ wₖ xₖ / r + b the error is at most

    u |y|                          the result rounded to its dtype, u = 2^-p with p significant bits
  + λ u₃₂ √K Σ|wₖ xₖ| / r          K additions in fp32, u₃₂ = 2^-24
  + 2^-22 (Σ|wₖ xₖ| / r)           the scale: a hardware square root and one product
  + λ u √(Σ(wₖ xₖ)²) / r           only where the normed x is rounded before the matmul, or a gain rounds it

with λ = 8: roundings are modelled as independent and mean zero (Higham and Mary, "A New Approach to Probabilistic
Rounding Error Analysis", 2019), and Hoeffding's inequality then fails in one case of 4·10^13. A dropped, doubled or
misplaced product exceeds it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flashnorm.kernels.reference import ACTIVATIONS

CONFIDENCE = 8.0


class Expected(NamedTuple):
    """The exact result in fp64 and how far from it an output may lie, both (M, N)."""

    value: Tensor
    bound: Tensor


def expected_rms_linear(
    x: Tensor,
    weight: Tensor,
    eps: float,
    gain: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    rounds_input: bool = False,
) -> Expected:
    """The oracle of `rms_linear`. `x`: (M, K), `weight`: (N, K). `rounds_input`: the path rounds the normed x."""
    unit = torch.finfo(x.dtype).eps / 2
    wide, rows = x.double(), weight.double()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed = wide * scale if gain is None else wide * scale * gain.double()
    value = normed @ rows.t()
    if bias is not None:
        value = value + bias.double()
    magnitude = normed.abs() @ rows.abs().t()
    bound = unit * value.abs() + (CONFIDENCE * 2.0**-24 * x.shape[-1] ** 0.5 + 2.0**-22) * magnitude
    if rounds_input:
        bound = bound + CONFIDENCE * unit * (normed.square() @ rows.square().t()).sqrt()
    return Expected(value, bound + torch.finfo(x.dtype).smallest_normal * unit)


def expected_rms_swiglu_linear(
    x: Tensor,
    gate_up_weight: Tensor,
    eps: float,
    gain: Tensor | None = None,
    *,
    activation: str = "silu",
    plain_sequence: bool = False,
) -> Expected:
    """The oracle of `rms_swiglu_linear`: act(gate) ⊙ up. `plain_sequence`: normed x, gate and up are each rounded.

    With δ the bounds of gate and up, the product moves by |act'| δ_gate |up| + |act(gate)| δ_up + |act'| δ_gate δ_up;
    |act'| is at most 1.13 for GELU, 1.1 for SiLU and 1 for ReLU. The activation itself costs a few roundings of fp32.
    """
    rows = gate_up_weight.shape[0] // 2
    inside = expected_rms_linear(x, gate_up_weight, eps, gain, rounds_input=plain_sequence)
    unit = torch.finfo(x.dtype).eps / 2
    # Without the plain sequence the products are not rounded, so the rounding that the bound holds for them is not due.
    bound = inside.bound if plain_sequence else inside.bound - unit * inside.value.abs()
    gate, up = inside.value[:, :rows], inside.value[:, rows:]
    gate_bound, up_bound = bound[:, :rows], bound[:, rows:]
    value = ACTIVATIONS[activation](gate) * up
    moved = 1.13 * gate_bound * (up.abs() + up_bound) + ACTIVATIONS[activation](gate).abs() * up_bound
    last = unit * value.abs() + 2.0**-20 * gate.abs() * up.abs() + torch.finfo(x.dtype).smallest_normal * unit
    return Expected(value, moved + last)


def exceeds(actual: Tensor, expected: Expected) -> float:
    """The largest error in units of its bound; infinite where exactly one of the two is not finite or a NaN."""
    error = (actual.double() - expected.value).abs() / expected.bound
    same_special = actual.isnan() & expected.value.isnan() | (actual.double() == expected.value)
    error = torch.where(same_special, 0.0, error)
    return torch.where(error.isnan(), float("inf"), error).max().item()
