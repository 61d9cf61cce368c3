"""Run `streamed.cu`: the deferred norm of one row at the speed of memory, on Hopper GPUs."""

from __future__ import annotations

import struct
from functools import cache

import torch
from torch import Tensor

from flashnorm.kernels.configs import Streamed
from flashnorm.kernels.cuda import kernel as kernels
from flashnorm.kernels.cuda.driver import Grid, current_stream, launch
from flashnorm.kernels.cuda.memory import streamed_bytes, streamed_slot

_WARP = 32
_ALL = 2**31 - 1
_PROBLEM = struct.Struct("QQQQqifiiii")


def streamed(
    x: Tensor,
    weight: Tensor,
    eps: float,
    bias: Tensor | None,
    out: Tensor,
    config: Streamed,
    *,
    activation: str | None = None,
    static_weight: bool = False,
) -> None:
    """Write (x Wᵀ)/RMS(x) + bias into `out`, or act(gate) ⊙ up of it where `activation` is given.

    `static_weight`: nothing that may still run writes the weight, so its first bytes are read, and the next kernel let
    in, before the kernel before this one has ended.
    `x`: (1, K), `weight`: (N, K), or (2N, K) with gate first, `out`: (1, N); bf16 or fp16, all addressable, and K a
    multiple of 8.
    """
    N = out.shape[1]
    kernel = _kernel(config, x.dtype, activation, x.shape[1], x.device)
    launch(
        kernel.function,
        Grid(min(N, kernel.multiprocessors * config.blocks), _WARP * (config.warps + 1), kernel.shared),
        (packed_problem(x, weight, eps, bias, out, config, static_weight=static_weight),),
        current_stream(x.device),
    )


def packed_problem(
    x: Tensor, weight: Tensor, eps: float, bias: Tensor | None, out: Tensor, config: Streamed, *, static_weight: bool
) -> bytes:
    """`struct Problem` of the source."""
    lead = _ALL if config.lead is None else config.lead
    return _PROBLEM.pack(
        x.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        weight.stride(0),
        out.shape[1],
        eps,
        config.prefetch,
        config.pace,
        lead,
        static_weight,
    )


@cache
def _kernel(
    config: Streamed, dtype: torch.dtype, activation: str | None, k: int, device: torch.device
) -> kernels.Kernel:
    shared = streamed_bytes(config, k, gated=activation is not None)
    return kernels.kernel(source(config, k, dtype, activation), "streamed", shared, device)


def source(config: Streamed, k: int, dtype: torch.dtype, activation: str | None = None) -> str:
    """The text that is compiled for one configuration and width."""
    macros = {
        "K": k,
        "CHUNK_K": config.chunk_k,
        "ROWS": config.rows,
        "STAGES": config.stages,
        "SLOT": streamed_slot(config, k),
        "WARPS": config.warps,
        "ON_THE_WAY": min(config.on_the_way, config.stages),
        "TIMED": 0,
    }
    return kernels.source(("ring", "streamed"), macros, dtype, activation)
