"""Run a deferred norm in the way a configuration names. The only place that imports the Triton kernels."""

from __future__ import annotations

from torch import Tensor

from flashnorm.kernels import reference
from flashnorm.kernels.configs import Config, DeferredGemm, Fused, Gemv, NormLinear, Reference, SplitK, TmaGemm


def run(
    config: Config, x: Tensor, weight: Tensor, eps: float, gain: Tensor | None, bias: Tensor | None, out: Tensor
) -> None:
    """Write ((x ⊙ gain) Wᵀ)/RMS(x) + bias into `out`. `x`: (M, K), `weight`: (N, K), `out`: (M, N), rows contiguous.

    `gain` must be None for the families that `dispatch.fits` refuses it to.
    """
    match config:
        case Reference():
            out.copy_(reference.rms_linear(x, weight, eps, gain, bias))
        case Gemv():
            from flashnorm.kernels.gemv import gemv

            gemv(x, weight, eps, gain, bias, out, config)
        case SplitK():
            from flashnorm.kernels.split_k import split_k

            split_k(x, weight, eps, bias, out, config)
        case Fused():
            from flashnorm.kernels.fused import fused

            fused(x, weight, eps, bias, out, config)
        case DeferredGemm():
            from flashnorm.kernels.deferred_gemm import deferred_gemm

            deferred_gemm(x, weight, eps, bias, out, config)
        case NormLinear():
            from flashnorm.kernels.norm_linear import norm_linear

            norm_linear(x, weight, eps, gain, bias, out, config)
        case TmaGemm():
            from flashnorm.kernels.cuda.tma_gemm import tma_gemm

            tma_gemm(x, weight, eps, bias, out, config)
