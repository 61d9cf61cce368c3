"""The deferred norm for one or a few rows: a matrix-vector product that sees all of x anyway, so its RMS is free.

Each program owns `block_n` outputs of one row of x. It reads that row once, for the products and for the sum of
squares alike, and scales at the end: y = (W x) · 1/RMS(x) + b. Sums run in a fixed order, so the result is bitwise
repeatable. Any K, any N, any row stride.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flashnorm.kernels.configs import Gemv
from flashnorm.kernels.launch import launch_options, prefetch_rows, supports_pdl


@triton.jit
def _part_of(rows, columns, start, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns `start` to `start + BLOCK_K` of rows that are read once."""
    k = start + columns
    if K % BLOCK_K == 0:
        return tl.load(rows + k[None, :], eviction_policy="evict_first")
    return tl.load(rows + k[None, :], mask=(k < K)[None, :], other=0.0)


@triton.jit
def _gemv_kernel(
    x,
    weight,
    gain,
    bias,
    out,
    x_stride,
    weight_stride,
    out_stride,
    N,
    eps,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PREFETCH: tl.constexpr,
    HAS_GAIN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    STATIC: tl.constexpr,
    PDL: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask = rows < N
    safe_rows = tl.where(row_mask, rows, N - 1)
    m = tl.program_id(1).to(tl.int64)
    columns = tl.arange(0, BLOCK_K)
    weight_rows = weight + safe_rows.to(tl.int64)[:, None] * weight_stride
    if STATIC:  # nobody writes the weight, so its first part may come before the wait
        first = _part_of(weight_rows, columns, 0, K, BLOCK_K)
    if PDL:
        if PREFETCH > 0:
            prefetch_rows(weight, safe_rows, weight_stride, 0, K, PREFETCH)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    products = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + columns
        if K % BLOCK_K == 0:
            values = tl.load(x + m * x_stride + k).to(tl.float32)
        else:
            values = tl.load(x + m * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
        if STATIC:
            weights = first.to(tl.float32)
            if start + BLOCK_K < K:
                first = _part_of(weight_rows, columns, start + BLOCK_K, K, BLOCK_K)
        else:
            weights = _part_of(weight_rows, columns, start, K, BLOCK_K).to(tl.float32)
        squares += values * values
        if HAS_GAIN:
            values *= tl.load(gain + k, mask=k < K, other=0.0).to(tl.float32)
        products += weights * values[None, :]
    result = tl.sum(products, 1) * tl.math.rsqrt(tl.sum(squares, 0) / K + eps)
    if HAS_BIAS:
        result += tl.load(bias + safe_rows).to(tl.float32)
    tl.store(out + m * out_stride + rows, result.to(out.dtype.element_ty), mask=row_mask)


def gemv(
    x: Tensor,
    weight: Tensor,
    eps: float,
    gain: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    config: Gemv,
    *,
    static_weight: bool = False,
) -> None:
    """Write (x Wᵀ)/RMS(x) + bias into `out`. `x`: (M, K), `weight`: (N, K), `out`: (M, N); last axes contiguous.

    `static_weight`: nothing that may still run writes the weight.
    """
    (M, K), N = x.shape, weight.shape[0]
    pdl = supports_pdl(x.device)
    _gemv_kernel[(triton.cdiv(N, config.block_n), M)](
        x,
        weight,
        gain if gain is not None else x,
        bias if bias is not None else x,
        out,
        x.stride(0),
        weight.stride(0),
        out.stride(0),
        N,
        eps,
        K=K,
        BLOCK_N=config.block_n,
        BLOCK_K=min(config.block_k, triton.next_power_of_2(K)),
        PREFETCH=config.prefetch,
        HAS_GAIN=gain is not None,
        HAS_BIAS=bias is not None,
        STATIC=static_weight,
        PDL=pdl,
        num_warps=config.warps,
        **launch_options(pdl),
    )
