"""One row through a linear, with all that surrounds it: norm before; bias, activation, gate and residual after.

Each program owns `block_n` outputs of one row of x and reads that row once, for the products and the sum of squares
alike: y = residual + multiplier · act((W x) / RMS(x) + b). Nothing in a decode step writes weights, so the first tile
of them is fetched before the wait for the kernel in front. Sums run in a fixed order: the result is bitwise repeatable.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flashnorm.kernels.configs import Gemv
from flashnorm.kernels.decode.activations import NUMBERS, activate
from flashnorm.kernels.launch import launch_options, supports_pdl
from flashnorm.kernels.surroundings import Surroundings


@triton.jit
def _tile(rows, columns, K: tl.constexpr):
    # Weights are used once: they should leave the caches before anything else does.
    return tl.load(rows + columns[None, :], mask=(columns < K)[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def _matvec_kernel(
    x,
    weight,
    gain,
    bias,
    residual,
    out,
    x_stride,
    weight_stride,
    residual_stride,
    out_stride,
    N,
    eps,
    multiplier,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORM: tl.constexpr,
    HAS_GAIN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    safe = tl.minimum(rows, N - 1)
    m = tl.program_id(1).to(tl.int64)
    columns = tl.arange(0, BLOCK_K)
    weight_rows = weight + safe.to(tl.int64)[:, None] * weight_stride
    up_rows = weight + (safe + N).to(tl.int64)[:, None] * weight_stride
    tile = _tile(weight_rows, columns, K)
    if GATED:
        up_tile = _tile(up_rows, columns, K)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    products = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    up_products = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + columns
        values = tl.load(x + m * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
        if NORM:
            squares += values * values
            if HAS_GAIN:
                values *= tl.load(gain + k, mask=k < K, other=0.0).to(tl.float32)
        products += tile.to(tl.float32) * values[None, :]
        if GATED:
            up_products += up_tile.to(tl.float32) * values[None, :]
        if K > BLOCK_K:  # the next tile is on its way while this one is used; behind the last there is nothing
            tile = _tile(weight_rows, k + BLOCK_K, K)
            if GATED:
                up_tile = _tile(up_rows, k + BLOCK_K, K)
    scale = 1.0
    if NORM:
        scale = tl.math.rsqrt(tl.sum(squares, 0) / K + eps)
    result = tl.sum(products, 1) * scale
    if HAS_BIAS:
        result += tl.load(bias + safe).to(tl.float32)
    if ACTIVATION >= 0:
        result = activate(result, ACTIVATION)
    if GATED:
        up = tl.sum(up_products, 1) * scale
        if HAS_BIAS:
            up += tl.load(bias + N + safe).to(tl.float32)
        result *= up
    result *= multiplier
    if HAS_RESIDUAL:
        result += tl.load(residual + m * residual_stride + safe).to(tl.float32)
    tl.store(out + m * out_stride + rows, result.to(out.dtype.element_ty), mask=rows < N)


def matvec(x: Tensor, weight: Tensor, out: Tensor, around: Surroundings, config: Gemv) -> None:
    """Write `reference.matvec` into `out` (rows, N), of any floating dtype.

    `x`: (rows, K); `weight`: (N, K), or (2N, K) where gated; last axes contiguous. Every row reads the weights again.
    """
    (rows, K), N = x.shape, out.shape[1]
    residual = around.residual if around.residual is not None else x
    pdl = supports_pdl(x.device)
    _matvec_kernel[(triton.cdiv(N, config.block_n), rows)](
        x,
        weight,
        around.gain if around.gain is not None else x,
        around.bias if around.bias is not None else x,
        residual,
        out,
        x.stride(0),
        weight.stride(0),
        residual.stride(0),
        out.stride(0),
        N,
        around.eps or 0.0,
        around.multiplier,
        K=K,
        BLOCK_N=config.block_n,
        BLOCK_K=min(config.block_k, triton.next_power_of_2(K)),
        NORM=around.eps is not None,
        HAS_GAIN=around.gain is not None,
        HAS_BIAS=around.bias is not None,
        ACTIVATION=-1 if around.activation is None else NUMBERS[around.activation],
        GATED=around.gated,
        HAS_RESIDUAL=around.residual is not None,
        PDL=pdl,
        num_warps=config.warps,
        **launch_options(pdl),
    )


def tile_for(outputs: int, width: int, *, gated: bool) -> Gemv:
    """The tile that was fastest for shapes of 1 to 8 billion parameters: some 4096 to 8192 weights in flight.

    Two rows of W per program where they are long, four where there are many; a gated program reads twice as many.
    """
    block_k = min(2048, triton.next_power_of_2(width))
    rows = max(1, 4096 // block_k) * (2 if outputs >= 1 << 14 and not gated else 1)
    return Gemv(min(rows, 8), block_k, warps=4)
