"""Norm and linear as one operation. Importable without Triton; the kernels load at their first use on a GPU."""

from __future__ import annotations

from flashnorm.kernels.codes import quantize_weight
from flashnorm.kernels.gated_ops import rms_swiglu_linear
from flashnorm.kernels.ops import rms_linear
from flashnorm.kernels.residual_ops import add_sumsq, linear_residual
from flashnorm.kernels.two_stream import overlapped_rms_linear
from flashnorm.kernels.w8a8_ops import rms_linear_w8a8

__all__ = [
    "add_sumsq",
    "linear_residual",
    "overlapped_rms_linear",
    "quantize_weight",
    "rms_linear",
    "rms_linear_w8a8",
    "rms_swiglu_linear",
]
