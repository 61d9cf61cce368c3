"""Multiply by a weight in eight bits in the way a configuration names. The only place that imports those kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from flashnorm.kernels import reference
from flashnorm.kernels.w8a8_configs import CodesGemv, CodesSplitK, Config, Library, Reference
from flashnorm.kernels.w8a8_products import library_product, rows_of_codes


def run(
    config: Config,
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    eps: float,
    bias: Tensor | None,
    out: Tensor,
    *,
    static_weight: bool = False,
) -> None:
    """Write (c(x) Wᵀ) ⊙ s(x)/RMS(x) ⊙ weight_scale + bias into `out`.

    `x`: (M, K), `weight`: codes (N, K), `out`: (M, N), rows contiguous; `weight_scale`: (N,) fp32 and `bias`,
    contiguous. `config` must be one that `w8a8_dispatch.fits` takes. `static_weight`: nothing that may still run writes
    the weight; the matrix-vector kernel uses that.
    """
    match config:
        case Reference():
            out.copy_(reference.rms_linear_w8a8(x, weight, weight_scale, eps, bias))
        case CodesGemv():
            from flashnorm.kernels.codes_gemv import codes_gemv

            codes_gemv(x, weight, weight_scale, eps, bias, out, config, static_weight=static_weight)
        case CodesSplitK():
            from flashnorm.kernels.codes_split_k import codes_split_k

            codes_split_k(*_quantised(x, weight.dtype, len(x), eps), weight, weight_scale, bias, out, config)
        case Library():
            rows = rows_of_codes(len(x), weight.dtype)
            library_product(*_quantised(x, weight.dtype, rows, eps), weight, weight_scale, bias, out)


def _quantised(x: Tensor, dtype: torch.dtype, rows: int, eps: float) -> tuple[Tensor, Tensor]:
    """Codes (rows, K) of `x`, those beyond its own undefined, and their scales over the RMS, (M,) fp32."""
    from flashnorm.kernels.quantise import quantise

    codes = x.new_empty((rows, x.shape[1]), dtype=dtype)
    scale = x.new_empty(len(x), dtype=torch.float32)
    quantise(x, eps, codes, scale)
    return codes, scale
