"""The residual stream after a branch: residual + multiplier · norm(branch), where a norm stands behind the branch or a
library matmul made it."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flashnorm.kernels.launch import launch_options, supports_pdl

_BLOCK = 4096


@triton.jit
def _join_kernel(
    x,
    residual,
    gain,
    out,
    x_stride,
    residual_stride,
    out_stride,
    N: tl.constexpr,
    eps,
    multiplier,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    HAS_GAIN: tl.constexpr,
    PDL: tl.constexpr,
):
    m = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    scale = multiplier
    if NORM:
        squares = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, N, BLOCK):
            n = start + tl.arange(0, BLOCK)
            values = tl.load(x + m * x_stride + n, mask=n < N, other=0.0).to(tl.float32)
            squares += values * values
        scale = multiplier * tl.math.rsqrt(tl.sum(squares, 0) / N + eps)
    for start in range(0, N, BLOCK):
        n = start + tl.arange(0, BLOCK)
        values = tl.load(x + m * x_stride + n, mask=n < N, other=0.0).to(tl.float32) * scale
        if HAS_GAIN:
            values *= tl.load(gain + n, mask=n < N, other=0.0).to(tl.float32)
        values += tl.load(residual + m * residual_stride + n, mask=n < N, other=0.0).to(tl.float32)
        tl.store(out + m * out_stride + n, values.to(out.dtype.element_ty), mask=n < N)


def join(
    x: Tensor, residual: Tensor, out: Tensor, *, eps: float | None, gain: Tensor | None, multiplier: float
) -> None:
    """Write `reference.join` into `out`. All (rows, N), rows contiguous; `out` may be `x` or `residual`."""
    rows, N = x.shape
    pdl = supports_pdl(x.device)
    _join_kernel[(rows,)](
        x,
        residual,
        gain if gain is not None else x,
        out,
        x.stride(0),
        residual.stride(0),
        out.stride(0),
        N,
        eps or 0.0,
        multiplier,
        BLOCK=min(_BLOCK, triton.next_power_of_2(N)),
        NORM=eps is not None,
        HAS_GAIN=gain is not None,
        PDL=pdl,
        num_warps=8,
        **launch_options(pdl),
    )
