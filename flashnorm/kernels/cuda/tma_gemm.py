"""Run `deferred.cu`: the warp-specialised deferred norm of Hopper GPUs."""

from __future__ import annotations

import ctypes
import struct
from functools import cache

import torch
from torch import Tensor

from flashnorm.kernels.configs import TmaGemm
from flashnorm.kernels.cuda import kernel as kernels
from flashnorm.kernels.cuda.counters import COUNTERS, counters, prepare
from flashnorm.kernels.cuda.driver import Grid, launch, tensor_map
from flashnorm.kernels.cuda.memory import BLOCK_K, stored_columns, tma_gemm_bytes
from flashnorm.kernels.cuda.wgmma import wgmma_source

_WARPGROUP = 128


def tma_gemm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    bias: Tensor | None,
    out: Tensor,
    config: TmaGemm,
    *,
    activation: str | None = None,
) -> None:
    """Write (x Wᵀ)/RMS(x) + bias into `out`, or act(gate) ⊙ up of it where `activation` is given.

    `x`: (M, K), `weight`: (N, K), or (2N, K) with gate first, `out`: (M, N); bf16 or fp16, all addressable.
    """
    (M, K), N = x.shape, out.shape[1]
    kernel = _kernel(config, x.dtype, activation, x.device)
    width = config.block_n // (2 if activation else 1)
    x_rows = min(config.block_m, M)
    tiles = -(-M // config.block_m) * -(-N // width)
    beside = config.beside if config.norm == "beside" else 0
    stream = torch.cuda.current_stream(x.device)
    scale = torch.empty(M if beside else 0, dtype=torch.float32, device=x.device)
    fetched = counters(stream).data_ptr() if beside else 0
    blocks = beside + min(kernel.multiprocessors - beside, tiles)
    launch(
        kernel.function,
        Grid(blocks, _WARPGROUP * (1 + config.consumers), kernel.shared),
        (
            tensor_map(x, x_rows, BLOCK_K),
            tensor_map(weight, width, BLOCK_K),
            tensor_map(out, 64, stored_columns(width)),
            tensor_map(x, config.rows, BLOCK_K),
            ctypes.c_void_p(bias.data_ptr() if bias is not None else None),
            struct.pack("iiifiiii", M, N, K, eps, config.group, config.prefetch, x_rows, beside)
            + struct.pack("QQQi", scale.data_ptr(), fetched + 4, fetched, _span(M, config.block_m, -(-tiles // blocks)))
            + bytes(4),
        ),
        stream.cuda_stream,
    )


def _span(m: int, block_m: int, waves: int) -> int:
    """Rows that share a counter: whole tiles. Each wave of tiles waits for about its part of the rows; a count more
    costs the warps that take them a fence each."""
    return -(-m // (block_m * min(waves, COUNTERS - 1))) * block_m


@cache
def _kernel(config: TmaGemm, dtype: torch.dtype, activation: str | None, device: torch.device) -> kernels.Kernel:
    prepare(device)
    shared = tma_gemm_bytes(config, gated=activation is not None)
    return kernels.kernel(source(config, dtype, activation), "deferred", shared, device)


def source(config: TmaGemm, dtype: torch.dtype, activation: str | None = None) -> str:
    """The text that is compiled for one configuration."""
    macros = {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "CONSUMERS": config.consumers,
        "STAGES": config.stages,
        "NORM": config.norm.upper(),
        "ROWS": config.rows,
    }
    return kernels.source(("deferred",), macros, dtype, activation, wgmma_source(config.block_n, kernels.HALF[dtype]))
