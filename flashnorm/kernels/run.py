"""Run a deferred norm in the way a configuration names. The only place that imports the kernels."""

from __future__ import annotations

from torch import Tensor

from flashnorm.kernels import reference
from flashnorm.kernels.configs import (
    Config,
    DeferredGemm,
    Fused,
    Gemv,
    NormLinear,
    Reference,
    Skinny,
    SplitK,
    Streamed,
    TmaGemm,
)
from flashnorm.kernels.surroundings import Surroundings


def run(
    config: Config,
    x: Tensor,
    weight: Tensor,
    eps: float,
    gain: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    activation: str | None = None,
    *,
    static_weight: bool = False,
) -> None:
    """Write ((x ⊙ gain) Wᵀ)/RMS(x) + bias into `out`, or act(gate) ⊙ up of it where `activation` is given.

    `x`: (M, K), `weight`: (N, K), or (2N, K) with gate first, `out`: (M, N), rows contiguous. `gain` and `activation`
    must be None for the families that `dispatch.fits` refuses them to, and a gated form takes no `bias`.
    `static_weight`: nothing that may still run writes the weight; the kernels for one row or a few use that.
    """
    match config:
        case Reference():
            out.copy_(_reference(x, weight, eps, gain, bias, activation))
        case Gemv():
            from flashnorm.kernels.gemv import gemv

            gemv(x, weight, eps, gain, bias, out, config, static_weight=static_weight)
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
            from flashnorm.kernels.norm_linear import norm_gated_linear, norm_linear

            if activation is None:
                norm_linear(x, weight, eps, gain, bias, out, config)
            else:
                norm_gated_linear(x, weight, eps, gain, out, config, activation)
        case TmaGemm():
            from flashnorm.kernels.cuda.tma_gemm import tma_gemm

            tma_gemm(x, weight, eps, bias, out, config, activation=activation)
        case Streamed():
            from flashnorm.kernels.cuda.streamed import streamed

            streamed(x, weight, eps, bias, out, config, activation=activation, static_weight=static_weight)
        case Skinny():
            from flashnorm.kernels.cuda.skinny import skinny

            around = Surroundings(eps=eps, bias=bias, activation=activation, gated=activation is not None)
            skinny(x, weight, out, around, config, static_weight=static_weight)


def _reference(
    x: Tensor, weight: Tensor, eps: float, gain: Tensor | None, bias: Tensor | None, activation: str | None
) -> Tensor:
    if activation is None:
        return reference.rms_linear(x, weight, eps, gain, bias)
    return reference.rms_swiglu_linear(x, weight, eps, gain, activation)
