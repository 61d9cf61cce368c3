"""Norm and linear as one operation. Importable without Triton; the kernels load at their first use on a GPU."""

from __future__ import annotations

from flashnorm.kernels.ops import rms_linear
from flashnorm.kernels.two_stream import overlapped_rms_linear

__all__ = ["overlapped_rms_linear", "rms_linear"]
