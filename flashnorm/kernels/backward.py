"""The gradients of a deferred norm, in plain torch: the library's matmuls, and one pass over x for the norm.

With r = 1 / sqrt(mean(x²) + eps), x̂ = r x and y = (x̂ ⊙ gain) Wᵀ + bias, a gradient dy gives

    dW = dyᵀ (x̂ ⊙ gain),   dbias = Σ dy,   dz = dy W,   dgain = Σ dz ⊙ x̂,
    dx = r (dx̂ - x̂ mean(dx̂ ⊙ x̂)),   dx̂ = dz ⊙ gain,

sums over all rows, means over a row (Zhang and Sennrich, 2019, section 4, with eps inside the root). It is the gradient
of the plain sequence: y depends on x through the same function, whatever order the forward computes it in.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Gradients = tuple[Tensor | None, Tensor | None, None, Tensor | None, Tensor | None, None]


def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """What the backward needs of the operands of `rms_linear`; the scale is cheaper to take again than to keep."""
    x, weight, eps, gain, *_ = inputs
    ctx.save_for_backward(x, weight, gain)
    ctx.eps = eps


def gradients(ctx: Any, dy: Tensor) -> Gradients:
    """Of x, weight, eps, gain, bias and the promise about the weight, those that are asked for.

    The norm's part is in fp32 (fp64 for fp64); matmuls take operands in x's dtype, as those of the plain sequence do.
    """
    x, weight, gain = ctx.saved_tensors
    wants_x, wants_weight, _, wants_gain, wants_bias, *_ = ctx.needs_input_grad
    rows, dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    wide = torch.promote_types(x.dtype, torch.float32)
    scale = torch.rsqrt(rows.to(wide).square().mean(-1, keepdim=True) + ctx.eps)
    normed = rows.to(wide) * scale
    dx = dweight = dgain = dbias = None
    if wants_bias:
        dbias = dy.to(wide).sum(0).to(x.dtype)
    if wants_weight:
        scaled = normed if gain is None else normed * gain.to(wide)
        dweight = dy.t() @ scaled.to(x.dtype)
    if wants_x or wants_gain:
        dz = (dy @ weight).to(wide)
        if wants_gain:
            dgain = (dz * normed).sum(0).to(x.dtype)
        dnormed = dz if gain is None else dz * gain.to(wide)
        inner = (dnormed * normed).mean(-1, keepdim=True)
        dx = (scale * (dnormed - normed * inner)).to(x.dtype).view(x.shape) if wants_x else None
    return dx, dweight, None, dgain, dbias, None
