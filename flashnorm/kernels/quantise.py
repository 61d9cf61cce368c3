"""Rows as eight-bit codes in one pass, 1/RMS in their scale; and the scales of an integer product.

The largest magnitude and the sum of squares are taken of one read of the row, side by side: neither waits for the
other, as it has to where a gain stands between norm and quantisation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from flashnorm.kernels.codes import LARGEST, LEAST
from flashnorm.kernels.launch import launch_options, supports_pdl

_BLOCK = 1024
_LEAST = tl.constexpr(LEAST)


@triton.jit
def to_codes(quotient, codes, INTEGER: tl.constexpr, INTERPRETED: tl.constexpr):
    """`quotient` as elements of what `codes` points to, rounded to nearest, ties to even."""
    if INTEGER:
        quotient = (quotient + 12582912.0) - 12582912.0  # 1.5 · 2^23: what is below one is rounded away
    elif INTERPRETED:  # there the conversion rounds 1.0625 up; so put the values on its grid before it
        magnitude = tl.abs(quotient)
        exponent = tl.maximum(magnitude.to(tl.int32, bitcast=True) >> 23, 121)
        bits = ((exponent + 20) << 23) | 0x400000  # 1.5 · 2^20 of the magnitude: its ulp is the step
        grid = bits.to(tl.float32, bitcast=True)
        magnitude = (magnitude + grid) - grid
        quotient = tl.where(quotient < 0, -magnitude, magnitude)
    return quotient.to(codes.dtype.element_ty)


@triton.jit
def row_statistics(values, K, eps, LARGEST: tl.constexpr):
    """By what the fp32 `values` of a whole row of K, zeros behind, become quotients, and the codes' scale over RMS."""
    squares = tl.sum(values * values, 0)
    magnitude = tl.maximum(tl.max(tl.abs(values), 0), _LEAST)
    # A NaN may be lost in the maximum, but not in the sum.
    return tl.div_rn(LARGEST, magnitude), tl.div_rn(magnitude, LARGEST) * tl.math.rsqrt(squares / K + eps)


@triton.jit
def _quantise_kernel(
    x,
    codes,
    scale,
    x_stride,
    codes_stride,
    K,
    eps,
    LARGEST: tl.constexpr,
    WIDTH: tl.constexpr,
    INTEGER: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    m = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, WIDTH)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    values = tl.load(x + m * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
    factor, row_scale = row_statistics(values, K, eps, LARGEST)
    tl.store(codes + m * codes_stride + k, to_codes(values * factor, codes, INTEGER, INTERPRETED), mask=k < K)
    tl.store(scale + m, row_scale)


@triton.jit
def _scale_kernel(
    products,
    row_scale,
    column_scale,
    bias,
    out,
    out_stride,
    rows,
    N,
    SPLIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    m = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.load(products + m * N + n, mask=n < N, other=0)
    for split in tl.static_range(1, SPLIT):
        total += tl.load(products + (split * rows + m) * N + n, mask=n < N, other=0)
    value = total.to(tl.float32)
    value *= tl.load(row_scale + m) * tl.load(column_scale + n, mask=n < N, other=0.0)
    if HAS_BIAS:
        value += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + m * out_stride + n, value.to(out.dtype.element_ty), mask=n < N)


def quantise(x: Tensor, eps: float, codes: Tensor, scale: Tensor) -> None:
    """Write the codes of each row of `x`, and s/RMS(x), its scale with the norm in it.

    `x`: (M, K), rows contiguous, bf16, fp16 or fp32; `codes`: (at least M, K), e4m3 or int8; `scale`: (M,) fp32.
    """
    M, K = x.shape
    pdl = supports_pdl(x.device)
    _quantise_kernel[(M,)](
        x,
        codes,
        scale,
        x.stride(0),
        codes.stride(0),
        K,
        eps,
        LARGEST=LARGEST[codes.dtype],
        WIDTH=triton.next_power_of_2(K),
        INTEGER=codes.dtype == torch.int8,
        INTERPRETED=knobs.runtime.interpret,
        PDL=pdl,
        num_warps=row_warps(K),
        **launch_options(pdl),
    )


def row_warps(width: int) -> int:
    """Warps for a row that is held in registers: 16 values a thread, which are written as one request of 16 bytes."""
    return max(1, min(16, triton.next_power_of_2(width) // 512))


def scale_products(
    products: Tensor,
    row_scale: Tensor,
    column_scale: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    block: int = _BLOCK,
) -> None:
    """Write products · row_scale[:, None] · column_scale + bias.

    `products`: (at least M, N) int32 or fp32, contiguous, or several of them, (S, at least M, N), which are added in
    their order; `out`: (M, N), rows contiguous; scales fp32. `block`: outputs of a program.
    """
    M, N = out.shape
    pdl = supports_pdl(out.device)
    _scale_kernel[(M, triton.cdiv(N, block))](
        products,
        row_scale,
        column_scale,
        bias if bias is not None else out,
        out,
        out.stride(0),
        products.shape[-2],
        N,
        SPLIT=products.shape[0] if products.dim() == 3 else 1,
        HAS_BIAS=bias is not None,
        BLOCK=block,
        PDL=pdl,
        num_warps=4,
        **launch_options(pdl),
    )
