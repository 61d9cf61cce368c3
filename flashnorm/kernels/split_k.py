"""The deferred norm for up to 64 rows: tensor cores with the weights as the tall operand, K split among programs.

A few rows of x cannot fill a 64-row matrix instruction, but 64 rows of W can: each program multiplies `block_n` rows
of W by all rows of x over its share of K and stores fp32 partial products. A second kernel, launched while the first
still runs, takes the sum of squares of x, waits, adds the partial products in a fixed order and scales: the norm
hides behind the matmul, and the result is bitwise repeatable. (The sum of squares inside the matmul's loop, from a
second read of x, made the loop up to twice as slow.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from flashnorm.kernels.configs import SplitK
from flashnorm.kernels.launch import launch_options, prefetch_rows, supports_pdl


@triton.jit
def _partial_kernel(
    x_desc,
    weight_desc,
    weight,
    weight_stride,
    partial,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICE: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    first_row = tl.program_id(0) * BLOCK_N
    split = tl.program_id(1)
    start = split * SLICE
    stop = tl.minimum(start + SLICE, K)
    n = first_row + tl.arange(0, BLOCK_N)
    if PDL:
        if PREFETCH > 0:
            prefetch_rows(weight, tl.minimum(n, N - 1), weight_stride, start, stop, PREFETCH)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    products = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in range(start, stop, BLOCK_K):
        products = tl.dot(weight_desc.load([first_row, k]), x_desc.load([0, k]).T, products)
    m = tl.arange(0, BLOCK_M)
    offsets = (split.to(tl.int64) * M + m[None, :]) * N + n[:, None]
    tl.store(partial + offsets, products, mask=(m < M)[None, :] & (n < N)[:, None])


@triton.jit
def _reduce_kernel(
    partial,
    x,
    bias,
    out,
    x_stride,
    out_stride,
    M,
    N,
    K,
    eps,
    SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    m = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        # Before the wait: past the L1, which may hold what an earlier step had there.
        values = tl.load(x + m * x_stride + k, mask=k < K, other=0.0, cache_modifier=".cg").to(tl.float32)
        squares += values * values
    scale = tl.math.rsqrt(tl.sum(squares, 0) / K + eps)
    if PDL:
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((BLOCK_N,), tl.float32)
    for split in tl.static_range(SPLIT):
        total += tl.load(partial + (split * M + m) * N + n, mask=n < N, other=0.0)
    total *= scale
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + m * out_stride + n, total.to(out.dtype.element_ty), mask=n < N)


def split_k(x: Tensor, weight: Tensor, eps: float, bias: Tensor | None, out: Tensor, config: SplitK) -> None:
    """Write (x Wᵀ)/RMS(x) + bias into `out`. `x`: (M <= 64, K), `weight`: (N, K), bf16 or fp16, rows of 16 bytes."""
    (M, K), N = x.shape, weight.shape[0]
    pdl = supports_pdl(x.device)
    block_m = max(16, triton.next_power_of_2(M))
    share = triton.cdiv(triton.cdiv(K, config.block_k), config.split) * config.block_k
    split = triton.cdiv(K, share)
    partial = torch.empty((split, M, N), dtype=torch.float32, device=x.device)
    _partial_kernel[(triton.cdiv(N, config.block_n), split)](
        TensorDescriptor.from_tensor(x, [block_m, config.block_k]),
        TensorDescriptor.from_tensor(weight, [config.block_n, config.block_k]),
        weight,
        weight.stride(0),
        partial,
        M,
        N,
        K,
        BLOCK_M=block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        SLICE=share,
        PREFETCH=min(config.prefetch, triton.next_power_of_2(share)),
        PDL=pdl,
        num_warps=config.warps,
        num_stages=config.stages,
        **launch_options(pdl),
    )
    _reduce_kernel[(M, triton.cdiv(N, config.reduce_n))](
        partial,
        x,
        bias if bias is not None else x,
        out,
        x.stride(0),
        out.stride(0),
        M,
        N,
        K,
        eps,
        SPLIT=split,
        BLOCK_N=config.reduce_n,
        BLOCK_K=min(4096, triton.next_power_of_2(K)),
        HAS_BIAS=bias is not None,
        PDL=pdl,
        num_warps=4,
        **launch_options(pdl),
    )
