"""Up to 64 rows of codes by a weight in eight bits: matrix units with the weights as the tall operand, K split.

As in `split_k.py`, each program multiplies `block_n` rows of W by all rows of codes over its share of K. With one share
it applies the scales itself; with more it stores partial products, in fp32 or int32, and a second kernel adds them in a
fixed order and applies the scales. Nothing is cleared beforehand and nothing is added atomically.

Hopper's matrix units keep some 14 bits of a sum of e4m3 products: it is moved to fp32 every 128 products, as the bound
in `w8a8_bounds.py` has it. Sums of int8 products are exact.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from flashnorm.kernels.launch import launch_options, prefetch_rows, supports_pdl
from flashnorm.kernels.quantise import scale_products
from flashnorm.kernels.w8a8_configs import CodesSplitK

_PROMOTED = tl.constexpr(128)


@triton.jit
def _codes_partial_kernel(
    codes_desc,
    weight_desc,
    weight,
    row_scale,
    column_scale,
    bias,
    out,
    weight_stride,
    out_stride,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICE: tl.constexpr,
    SPLIT: tl.constexpr,
    PREFETCH: tl.constexpr,
    INTEGER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
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
    products = tl.zeros((BLOCK_N, BLOCK_M), tl.int32 if INTEGER else tl.float32)
    for k in range(start, stop, BLOCK_K):
        products = tl.dot(
            weight_desc.load([first_row, k]),
            codes_desc.load([0, k]).T,
            products,
            max_num_imprecise_acc=BLOCK_K if BLOCK_K < _PROMOTED else _PROMOTED,
            out_dtype=tl.int32 if INTEGER else tl.float32,
        )
    m = tl.arange(0, BLOCK_M)
    inside = (m < M)[None, :] & (n < N)[:, None]
    if SPLIT > 1:
        tl.store(out + (split.to(tl.int64) * M + m[None, :]) * N + n[:, None], products, mask=inside)
    else:
        value = products.to(tl.float32) * (
            tl.load(row_scale + m, mask=m < M, other=0.0)[None, :]
            * tl.load(column_scale + n, mask=n < N, other=0.0)[:, None]
        )
        if HAS_BIAS:
            value += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        target = out + m.to(tl.int64)[None, :] * out_stride + n[:, None]
        tl.store(target, value.to(out.dtype.element_ty), mask=inside)


def codes_split_k(
    codes: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out: Tensor,
    config: CodesSplitK,
) -> None:
    """Write (codes · weightᵀ) ⊙ scale[:, None] ⊙ weight_scale + bias into `out`.

    `codes`: (M <= 64, K) and `weight`: (N, K), of one dtype, rows of a multiple of 16 bytes; `scale`: (M,) and
    `weight_scale`: (N,), fp32; `out`: (M, N), rows contiguous.
    """
    (M, K), N = codes.shape, weight.shape[0]
    pdl = supports_pdl(codes.device)
    integer = weight.dtype == torch.int8
    share = triton.cdiv(triton.cdiv(K, config.block_k), config.split) * config.block_k
    split = triton.cdiv(K, share)
    partial = out
    if split > 1:
        partial = torch.empty((split, M, N), dtype=torch.int32 if integer else torch.float32, device=out.device)
    _codes_partial_kernel[(triton.cdiv(N, config.block_n), split)](
        TensorDescriptor.from_tensor(codes, [max(16, triton.next_power_of_2(M)), config.block_k]),
        TensorDescriptor.from_tensor(weight, [config.block_n, config.block_k]),
        weight,
        scale,
        weight_scale,
        bias if bias is not None else out,
        partial,
        weight.stride(0),
        out.stride(0),
        M,
        N,
        K,
        BLOCK_M=max(16, triton.next_power_of_2(M)),
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        SLICE=share,
        SPLIT=split,
        PREFETCH=min(config.prefetch, triton.next_power_of_2(share)),
        INTEGER=integer,
        HAS_BIAS=bias is not None,
        PDL=pdl,
        num_warps=config.warps,
        num_stages=config.stages,
        **launch_options(pdl),
    )
    if split > 1:
        scale_products(partial, scale, weight_scale, bias, out, block=config.reduce_n)
