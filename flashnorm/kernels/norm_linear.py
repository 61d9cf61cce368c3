"""The plain sequence with a fast norm: one read and one write of x, then the library's matmul.

Where a matmul is bound by arithmetic, the library's is hard to beat, and the cheapest norm is one that fills the
memory system: rows are held in registers between the sum of squares and the scaling, and many programs share an SM.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashnorm.kernels.configs import NormLinear
from flashnorm.kernels.elementwise import gate
from flashnorm.kernels.launch import launch_options, prefetch_weight, supports_pdl
from flashnorm.kernels.layout import row_bytes


@triton.jit
def _norm_kernel(
    x,
    gain,
    weight,
    out,
    x_stride,
    weight_stride,
    out_stride,
    M,
    N,
    K,
    eps,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_GAIN: tl.constexpr,
    PREFETCH: tl.constexpr,
    THREADS: tl.constexpr,
    EVICTION: tl.constexpr,
    PDL: tl.constexpr,
):
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, WIDTH)
    mask = (m < M)[:, None] & (k < K)[None, :]
    m = m.to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    source = x + m[:, None] * x_stride + k[None, :]
    values = tl.load(source, mask=mask, other=0.0, eviction_policy=EVICTION).to(tl.float32)
    if PREFETCH > 0:
        prefetch_weight(weight, weight_stride, N, PREFETCH, THREADS)
    values *= tl.math.rsqrt(tl.sum(values * values, 1) / K + eps)[:, None]
    if HAS_GAIN:
        values *= tl.load(gain + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
    tl.store(out + m[:, None] * out_stride + k[None, :], values.to(out.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, eps: float, gain: Tensor | None, weight: Tensor, out: Tensor, config: NormLinear) -> None:
    """Write x/RMS(x) · gain into `out`, and bring the matmul's `weight` nearer. `x`, `out`: (M, K), rows contiguous."""
    (M, K), N = x.shape, weight.shape[0]
    pdl = supports_pdl(x.device)
    _norm_kernel[(triton.cdiv(M, config.rows),)](
        x,
        gain if gain is not None else x,
        weight,
        out,
        x.stride(0),
        weight.stride(0),
        out.stride(0),
        M,
        N,
        K,
        eps,
        ROWS=config.rows,
        WIDTH=triton.next_power_of_2(K),
        HAS_GAIN=gain is not None,
        PREFETCH=row_bytes(weight, config.prefetch) if pdl else 0,
        THREADS=32 * config.warps,
        EVICTION="evict_first" if config.stream else "",
        PDL=pdl,
        num_warps=config.warps,
        **launch_options(pdl),
    )


def norm_linear(
    x: Tensor,
    weight: Tensor,
    eps: float,
    gain: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    config: NormLinear,
) -> None:
    """Write RMSNorm(x) Wᵀ + bias into `out`. The normed x is rounded to `x.dtype`, as in the plain sequence."""
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rms_norm(x, eps, gain, weight, normed, config)
    if bias is None:
        torch.mm(normed, weight.t(), out=out)
    else:
        torch.addmm(bias, normed, weight.t(), out=out)


def norm_gated_linear(
    x: Tensor,
    weight: Tensor,
    eps: float,
    gain: Tensor | None,
    out: Tensor,
    config: NormLinear,
    activation: str,
) -> None:
    """Write act(gate) ⊙ up of RMSNorm(x) [gate; up]ᵀ into `out`. `weight`: (2N, K), `out`: (M, N)."""
    products = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    norm_linear(x, weight, eps, gain, None, products, config)
    gate(products, out, activation)
