"""What stands between two matmuls that stay in a library: gating, and the residual add with its sum of squares."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flashnorm.kernels.launch import launch_options, supports_pdl

_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "relu": 2}
_BLOCK = 1024


@triton.jit
def _gate_kernel(products, out, out_stride, N, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    m = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = products + m * 2 * N
    gate = tl.load(row + n, mask=n < N, other=0.0).to(tl.float32)
    up = tl.load(row + N + n, mask=n < N, other=0.0).to(tl.float32)
    if ACTIVATION == 0:
        gate = gate / (1 + tl.exp(-gate))
    elif ACTIVATION == 1:  # x/2 (1 + tanh u) = x / (1 + exp(-2u)), u = sqrt(2/pi) (x + 0.044715 x³)
        gate = gate / (1 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
    else:
        gate = tl.where(gate < 0, 0.0, gate)  # keeps a NaN
    tl.store(out + m * out_stride + n, (gate * up).to(out.dtype.element_ty), mask=n < N)


@triton.jit
def _add_sumsq_kernel(
    x,
    residual,
    value,
    sumsq,
    x_stride,
    residual_stride,
    value_stride,
    N,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    m = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        n = start + tl.arange(0, BLOCK)
        left = tl.load(x + m * x_stride + n, mask=n < N, other=0.0).to(tl.float32)
        right = tl.load(residual + m * residual_stride + n, mask=n < N, other=0.0).to(tl.float32)
        total = (left + right).to(value.dtype.element_ty)
        tl.store(value + m * value_stride + n, total, mask=n < N)
        squares += total.to(tl.float32) * total.to(tl.float32)
    tl.store(sumsq + m, tl.sum(squares, 0))


def gate(products: Tensor, out: Tensor, activation: str) -> None:
    """Write act(gate) ⊙ up into `out`. `products`: (M, 2N) contiguous, gate first; `out`: (M, N), rows contiguous."""
    M, N = out.shape
    pdl = supports_pdl(out.device)
    _gate_kernel[(M, triton.cdiv(N, _BLOCK))](
        products, out, out.stride(0), N, _ACTIVATIONS[activation], _BLOCK, pdl, num_warps=4, **launch_options(pdl)
    )


def add_sumsq(x: Tensor, residual: Tensor, value: Tensor, sumsq: Tensor) -> None:
    """Write x + residual into `value`, and the sum of squares of each row of it, as rounded, into `sumsq`.

    `x`, `residual`, `value`: (M, N), rows contiguous; `sumsq`: (M,), fp32. `value` may be `x` or `residual`.
    """
    M, N = x.shape
    pdl = supports_pdl(x.device)
    _add_sumsq_kernel[(M,)](
        x,
        residual,
        value,
        sumsq,
        x.stride(0),
        residual.stride(0),
        value.stride(0),
        N,
        min(4096, triton.next_power_of_2(N)),
        pdl,
        num_warps=4,
        **launch_options(pdl),
    )
