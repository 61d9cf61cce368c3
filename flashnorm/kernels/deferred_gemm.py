"""The deferred norm for many rows: a persistent GEMM whose epilogue, and nothing earlier, waits for the RMS.

A small kernel takes 1/RMS of every row of x. The GEMM is launched while it runs, multiplies the raw rows, and joins
(`griddepcontrol.wait`) only before the scale: y = (x Wᵀ) ⊙ s. A tile is `block_n + extra_n` outputs wide, both powers
of two, because Triton knows no others: 128 + 64 = 192 fills 132 SMs where 128 and 256 leave a third of them idle.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from flashnorm.kernels.configs import DeferredGemm
from flashnorm.kernels.launch import launch_options, prefetch_weight, supports_pdl
from flashnorm.kernels.layout import row_bytes


@triton.jit
def _inverse_rms(x_rows, K, eps, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """1/RMS of the rows of x that the pointers `x_rows` begin."""
    squares = tl.zeros((ROWS, BLOCK_K), tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=1):
        k = start + tl.arange(0, BLOCK_K)
        values = tl.load(x_rows[:, None] + k[None, :], mask=(k < K)[None, :], other=0.0).to(tl.float32)
        squares += values * values
    return tl.math.rsqrt(tl.sum(squares, 1) / K + eps)


@triton.jit
def _scale_kernel(
    x,
    weight,
    scale,
    x_stride,
    weight_stride,
    M,
    N,
    K,
    eps,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    x_rows = x + tl.minimum(m, M - 1).to(tl.int64) * x_stride
    if PDL:
        if PREFETCH > 0:
            prefetch_weight(weight, weight_stride, N, PREFETCH, 128)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(scale + m, _inverse_rms(x_rows, K, eps, ROWS, BLOCK_K), mask=m < M)


@triton.jit
def _gemm_kernel(
    x_desc,
    weight_desc,
    extra_weight_desc,
    out_desc,
    extra_out_desc,
    x,
    x_stride,
    scale,
    bias,
    M,
    N,
    eps,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EXTRA_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    HALVES: tl.constexpr,
    OWN_SCALE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL and OWN_SCALE:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N + EXTRA_N)
    steps = tl.cdiv(K, BLOCK_K)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=EXTRA_N == 0):
        first = tile // (GROUP * tiles_n) * GROUP
        height = tl.minimum(tiles_m - first, GROUP)
        inside = tile % (GROUP * tiles_n)
        m0 = (first + inside % height) * BLOCK_M
        n0 = inside // height * (BLOCK_N + EXTRA_N)
        products = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if EXTRA_N > 0:
            extra = tl.zeros((BLOCK_M, EXTRA_N), tl.float32)
        for step in range(steps):
            values = x_desc.load([m0, step * BLOCK_K])
            products = tl.dot(values, weight_desc.load([n0, step * BLOCK_K]).T, products)
            if EXTRA_N > 0:
                extra = tl.dot(values, extra_weight_desc.load([n0 + BLOCK_N, step * BLOCK_K]).T, extra)
        m = m0 + tl.arange(0, BLOCK_M)
        if OWN_SCALE:
            factor = _inverse_rms(x + tl.minimum(m, M - 1).to(tl.int64) * x_stride, K, eps, BLOCK_M, BLOCK_K)[:, None]
        else:
            if PDL:
                tl.extra.cuda.gdc_wait()
                tl.extra.cuda.gdc_launch_dependents()
            factor = tl.load(scale + m, mask=m < M, other=0.0)[:, None]
        products *= factor
        if HAS_BIAS:
            n = n0 + tl.arange(0, BLOCK_N)
            products += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        if HALVES:
            left, right = tl.split(tl.permute(tl.reshape(products, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
            out_desc.store([m0, n0], left.to(out_desc.dtype))
            out_desc.store([m0, n0 + BLOCK_N // 2], right.to(out_desc.dtype))
        else:
            out_desc.store([m0, n0], products.to(out_desc.dtype))
        if EXTRA_N > 0:
            extra *= factor
            if HAS_BIAS:
                n = n0 + BLOCK_N + tl.arange(0, EXTRA_N)
                extra += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
            extra_out_desc.store([m0, n0 + BLOCK_N], extra.to(out_desc.dtype))


def inverse_rms(x: Tensor, eps: float, weight: Tensor, scale: Tensor, config: DeferredGemm) -> None:
    """Write 1/RMS of each row into `scale`. `x`: (M, K), last axis contiguous; `scale`: (M,), fp32."""
    (M, K), N = x.shape, weight.shape[0]
    pdl = supports_pdl(x.device)
    _scale_kernel[(triton.cdiv(M, config.scale_rows),)](
        x,
        weight,
        scale,
        x.stride(0),
        weight.stride(0),
        M,
        N,
        K,
        eps,
        ROWS=config.scale_rows,
        BLOCK_K=min(4096, triton.next_power_of_2(K)),
        PREFETCH=row_bytes(weight, config.prefetch),
        PDL=pdl,
        num_warps=4,
        **launch_options(pdl),
    )


def deferred_gemm(
    x: Tensor, weight: Tensor, eps: float, bias: Tensor | None, out: Tensor, config: DeferredGemm
) -> None:
    """Write (x Wᵀ)/RMS(x) + bias into `out`. `x`: (M, K), `weight`: (N, K), bf16 or fp16, rows of 16 bytes."""
    (M, K), N = x.shape, weight.shape[0]
    pdl = supports_pdl(x.device)
    scale = torch.empty(0 if config.own_scale else M, dtype=torch.float32, device=x.device)
    if not config.own_scale:
        inverse_rms(x, eps, weight, scale, config)
    tiles = triton.cdiv(M, config.block_m) * triton.cdiv(N, config.block_n + config.extra_n)
    programs = _multiprocessors(x.device)
    extra_n = config.extra_n or config.block_n
    _gemm_kernel[(min(programs, tiles),)](
        TensorDescriptor.from_tensor(x, [config.block_m, config.block_k]),
        TensorDescriptor.from_tensor(weight, [config.block_n, config.block_k]),
        TensorDescriptor.from_tensor(weight, [extra_n, config.block_k]),
        TensorDescriptor.from_tensor(out, [config.block_m, config.block_n // (2 if config.halves else 1)]),
        TensorDescriptor.from_tensor(out, [config.block_m, extra_n]),
        x,
        x.stride(0),
        scale,
        bias if bias is not None else scale,
        M,
        N,
        eps,
        K=K,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        EXTRA_N=config.extra_n,
        BLOCK_K=config.block_k,
        GROUP=config.group,
        HALVES=config.halves,
        OWN_SCALE=config.own_scale,
        PROGRAMS=programs,
        HAS_BIAS=bias is not None,
        PDL=pdl,
        num_warps=config.warps,
        num_stages=config.stages,
        **launch_options(pdl),
    )


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
