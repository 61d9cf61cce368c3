"""The baseline of `flashnorm bench fp8`: RMSNorm with its gain and dynamic quantisation, fused in one pass.

What serving engines run before a scaled matmul, as fast as we can write it: one read of x, the row held in registers,
fp32 arithmetic, the same launch as our own kernel. The gain stands between the norm and the largest magnitude, so the
second reduction has to wait for the first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from flashnorm.kernels.codes import LARGEST, LEAST
from flashnorm.kernels.launch import launch_options, supports_pdl
from flashnorm.kernels.quantise import row_warps, to_codes

_LEAST = tl.constexpr(LEAST)


@triton.jit
def _norm_quant_kernel(
    x,
    gain,
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
    factors = tl.load(gain + k, mask=k < K, other=0.0).to(tl.float32)
    values *= tl.math.rsqrt(tl.sum(values * values, 0) / K + eps)
    values *= factors
    magnitude = tl.maximum(tl.max(tl.abs(values), 0), _LEAST)
    quotient = values * tl.div_rn(LARGEST, magnitude)
    tl.store(codes + m * codes_stride + k, to_codes(quotient, codes, INTEGER, INTERPRETED), mask=k < K)
    tl.store(scale + m, tl.div_rn(magnitude, LARGEST))


def norm_quant(x: Tensor, gain: Tensor, eps: float, codes: Tensor, scale: Tensor) -> None:
    """Write the codes of RMSNorm(x) · gain and their scales. `x`, `codes`: (M, K); `gain`: (K,); `scale`: (M,) fp32."""
    M, K = x.shape
    pdl = supports_pdl(x.device)
    _norm_quant_kernel[(M,)](
        x,
        gain,
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
