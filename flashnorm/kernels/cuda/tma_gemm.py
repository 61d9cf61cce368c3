"""Run `deferred.cu`: the warp-specialised deferred norm of Hopper GPUs."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
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
    # In a cluster each block loads its part of the rows, whether they are inside of x or not.
    x_rows = min(config.block_m, M) if config.cluster == 1 else config.block_m // config.cluster
    plan = plan_of(config, M, -(-N // width), kernel.multiprocessors)
    stream = torch.cuda.current_stream(x.device)
    scale = torch.empty(M if plan.beside else 0, dtype=torch.float32, device=x.device)
    fetched = counters(stream).data_ptr() if plan.beside else 0
    launch(
        kernel.function,
        Grid(plan.blocks, _WARPGROUP * (1 + config.consumers), kernel.shared, cluster=config.cluster),
        (
            tensor_map(x, x_rows, BLOCK_K),
            tensor_map(weight, width, BLOCK_K),
            tensor_map(out, 64, stored_columns(width)),
            tensor_map(x, config.rows, BLOCK_K),
            ctypes.c_void_p(bias.data_ptr() if bias is not None else None),
            struct.pack("iiifiiii", M, N, K, eps, config.group, config.prefetch, x_rows, plan.beside)
            + struct.pack("QQQi", scale.data_ptr(), fetched + 4, fetched, plan.span)
            + bytes(4),
        ),
        stream.cuda_stream,
    )


@dataclass(frozen=True)
class Plan:
    """Blocks of the grid, the first of them that take 1/RMS, and the rows that share a counter of those taken."""

    blocks: int
    beside: int
    span: int


def plan_of(config: TmaGemm, m: int, columns: int, multiprocessors: int) -> Plan:
    """How (m, K) x and so many columns of tiles are shared out: whole clusters, each of which walks through as many
    columns at once as it has blocks. The last ones may lie outside of the output."""
    beside = config.beside if config.norm == "beside" else 0
    assert beside % config.cluster == 0, f"{beside} blocks beside are no whole clusters of {config.cluster}"
    tiles = -(-m // config.block_m) * -(-columns // config.cluster) * config.cluster
    blocks = beside + min((multiprocessors - beside) // config.cluster * config.cluster, tiles)
    return Plan(blocks, beside, _span(m, config.block_m, -(-tiles // blocks)))


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
        "CLUSTER": config.cluster,
    }
    return kernels.source(("deferred",), macros, dtype, activation, wgmma_source(config.block_n, kernels.HALF[dtype]))
