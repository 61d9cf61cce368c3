"""Run `streamed.cu`: the deferred norm of one row at the speed of memory, on Hopper GPUs."""

from __future__ import annotations

import struct
from functools import cache

import torch
from torch import Tensor

from flashnorm.kernels.configs import Streamed
from flashnorm.kernels.cuda import kernel as kernels
from flashnorm.kernels.cuda.driver import Grid, launch
from flashnorm.kernels.cuda.memory import streamed_bytes

_WARP = 32


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

    `static_weight`: nothing that may still run writes the weight, so its first bytes are read before the kernel before
    this one has ended.
    `x`: (1, K), `weight`: (N, K), or (2N, K) with gate first, `out`: (1, N); bf16 or fp16, all addressable, and K a
    multiple of 8.
    """
    K, N = x.shape[1], out.shape[1]
    kernel = _kernel(config, x.dtype, activation, K, x.device)
    launch(
        kernel.function,
        Grid(min(N, kernel.multiprocessors * config.blocks), _WARP * (config.warps + 1), kernel.shared),
        (
            struct.pack("QQQ", x.data_ptr(), weight.data_ptr(), out.data_ptr())
            + struct.pack("Qq", bias.data_ptr() if bias is not None else 0, weight.stride(0))
            + struct.pack("ifii", N, eps, config.prefetch, static_weight),
        ),
        torch.cuda.current_stream(x.device).cuda_stream,
    )


@cache
def _kernel(
    config: Streamed, dtype: torch.dtype, activation: str | None, k: int, device: torch.device
) -> kernels.Kernel:
    shared = streamed_bytes(config, gated=activation is not None)
    return kernels.kernel(source(config, k, dtype, activation), "streamed", shared, device)


def source(config: Streamed, k: int, dtype: torch.dtype, activation: str | None = None) -> str:
    """The text that is compiled for one configuration and width."""
    macros = {"K": k, "CHUNK_K": config.chunk_k, "STAGES": config.stages, "WARPS": config.warps}
    return kernels.source(("streamed",), macros, dtype, activation)
