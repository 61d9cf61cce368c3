"""The deferred norm in one kernel: each program takes the sum of squares of its rows of x, then multiplies them.

For matrices so small that a second launch would cost more than reading x twice, and for every shape that the bulk
copy engine cannot address: any K, any N, any row stride. The two passes over x are two loops: with one tile of x
feeding both the matrix instruction and the sum of squares, Triton 3.6 gave wrong sums at 19 of 100 tile shapes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashnorm.kernels.configs import Fused
from flashnorm.kernels.launch import launch_options, prefetch_rows, supports_pdl


@triton.jit
def _fused_kernel(
    x,
    weight,
    bias,
    out,
    x_stride,
    weight_stride,
    out_stride,
    M,
    N,
    eps,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PREFETCH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IEEE: tl.constexpr,
    PDL: tl.constexpr,
):
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows beyond the last read the last row again: no mask in the loop, and nothing of theirs is stored.
    safe_m = tl.minimum(m, M - 1).to(tl.int64)
    safe_n = tl.minimum(n, N - 1).to(tl.int64)
    if PDL:
        if PREFETCH > 0:
            prefetch_rows(weight, safe_n, weight_stride, 0, K, PREFETCH)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    columns = tl.arange(0, BLOCK_K)
    x_tile = x + safe_m[:, None] * x_stride + columns[None, :]
    weight_tile = weight + safe_n[:, None] * weight_stride + columns[None, :]
    products = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    squares = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=1):
        wide = tl.load(x_tile + start, mask=(columns < K - start)[None, :], other=0.0).to(tl.float32)
        squares += wide * wide
    scale = tl.math.rsqrt(tl.sum(squares, 1) / K + eps)
    for start in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            values = tl.load(x_tile + start)
            weights = tl.load(weight_tile + start)
        else:
            inside = (columns < K - start)[None, :]
            values = tl.load(x_tile + start, mask=inside, other=0.0)
            weights = tl.load(weight_tile + start, mask=inside, other=0.0)
        if IEEE:
            products = tl.dot(values, weights.T, products, input_precision="ieee")
        else:
            products = tl.dot(values, weights.T, products)
    result = products * scale[:, None]
    if HAS_BIAS:
        result += tl.load(bias + safe_n).to(tl.float32)[None, :]
    target = out + m.to(tl.int64)[:, None] * out_stride + n[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


def fused(x: Tensor, weight: Tensor, eps: float, bias: Tensor | None, out: Tensor, config: Fused) -> None:
    """Write (x Wᵀ)/RMS(x) + bias into `out`. `x`: (M, K), `weight`: (N, K), `out`: (M, N); last axes contiguous."""
    (M, K), N = x.shape, weight.shape[0]
    pdl = supports_pdl(x.device)
    _fused_kernel[(triton.cdiv(N, config.block_n), triton.cdiv(M, config.block_m))](
        x,
        weight,
        bias if bias is not None else x,
        out,
        x.stride(0),
        weight.stride(0),
        out.stride(0),
        M,
        N,
        eps,
        K=K,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        PREFETCH=config.prefetch,
        HAS_BIAS=bias is not None,
        IEEE=weight.dtype == torch.float32,
        PDL=pdl,
        num_warps=config.warps,
        num_stages=config.stages,
        **launch_options(pdl),
    )
