"""A few rows by a weight in eight bits, in one kernel: a matrix-vector product that makes the codes of x itself.

Each program owns `block_n` outputs. It holds its rows of W whole, as codes; then, for one row of x after another, it
takes the largest magnitude and the sum of squares, makes the codes that `quantise` would have made, multiplies and
scales once. So there is no pass over x beforehand: norm and quantisation are repeated by every program, while its
codes of W are on their way. Products are exact and sums run in a fixed order. Any K whose row fits in the registers
of a program, any N, any row stride.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from flashnorm.kernels.codes import LARGEST
from flashnorm.kernels.launch import launch_options, supports_pdl
from flashnorm.kernels.quantise import row_statistics, to_codes
from flashnorm.kernels.w8a8_configs import CodesGemv


@triton.jit
def _row(addresses, k, K: tl.constexpr, WIDTH: tl.constexpr):
    """The values at the addresses of columns `k`, zeros beyond K."""
    if K == WIDTH:
        return tl.load(addresses)
    return tl.load(addresses, mask=k < K, other=0.0)


@triton.jit
def _codes_gemv_kernel(
    x,
    weight,
    weight_scale,
    bias,
    out,
    x_stride,
    weight_stride,
    out_stride,
    N,
    eps,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LARGEST: tl.constexpr,
    INTEGER: tl.constexpr,
    INTERPRETED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    STATIC: tl.constexpr,
    PDL: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    safe_n = tl.minimum(n, N - 1)
    k = tl.arange(0, WIDTH)
    weights = weight + safe_n.to(tl.int64)[:, None] * weight_stride + k[None, :]
    if STATIC:  # nobody writes the weight, so it may be read before the wait
        held = _row(weights, k[None, :], K, WIDTH)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if not STATIC:
        held = _row(weights, k[None, :], K, WIDTH)
    column_scale = tl.load(weight_scale + safe_n)
    added = tl.zeros((BLOCK_N,), tl.float32)
    if HAS_BIAS:
        added = tl.load(bias + safe_n).to(tl.float32)
    x += k
    out += n
    following = _row(x, k, K, WIDTH)
    for m in tl.static_range(ROWS):
        values = following.to(tl.float32)
        if m + 1 < ROWS:  # on its way while this row is reduced
            x += x_stride
            following = _row(x, k, K, WIDTH)
        factor, row_scale = row_statistics(values, K, eps, LARGEST)
        codes = to_codes(values * factor, weight, INTEGER, INTERPRETED)
        if INTEGER:
            products = tl.sum(held.to(tl.int32) * codes.to(tl.int32)[None, :], 1).to(tl.float32)
        else:
            products = tl.sum(held.to(tl.float32) * codes.to(tl.float32)[None, :], 1)
        result = products * (row_scale * column_scale) + added
        tl.store(out, result.to(out.dtype.element_ty), mask=n < N)
        out += out_stride


def codes_gemv(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    eps: float,
    bias: Tensor | None,
    out: Tensor,
    config: CodesGemv,
    *,
    static_weight: bool = False,
) -> None:
    """Write (c(x) Wᵀ) ⊙ s(x)/RMS(x) ⊙ weight_scale + bias into `out`.

    `x`: (M, K), `weight`: codes (N, K), `out`: (M, N), last axes contiguous; `weight_scale`: (N,) fp32. One program
    goes through all M rows: M is small. `static_weight`: nothing that may still run writes the weight.
    """
    (M, K), N = x.shape, weight.shape[0]
    pdl = supports_pdl(x.device)
    _codes_gemv_kernel[(triton.cdiv(N, config.block_n),)](
        x,
        weight,
        weight_scale,
        bias if bias is not None else x,
        out,
        x.stride(0),
        weight.stride(0),
        out.stride(0),
        N,
        eps,
        K=K,
        ROWS=M,
        WIDTH=triton.next_power_of_2(K),
        BLOCK_N=config.block_n,
        LARGEST=LARGEST[weight.dtype],
        INTEGER=weight.dtype == torch.int8,
        INTERPRETED=knobs.runtime.interpret,
        HAS_BIAS=bias is not None,
        STATIC=static_weight,
        PDL=pdl,
        num_warps=config.warps,
        **launch_options(pdl),
    )
