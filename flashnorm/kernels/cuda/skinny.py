"""Run `skinny.cu`: a linear for few rows of x at the speed of memory, with its surroundings, on Hopper GPUs."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from flashnorm.kernels.configs import Skinny
from flashnorm.kernels.cuda import kernel as kernels
from flashnorm.kernels.cuda.driver import Grid, current_stream, launch, tensor_map
from flashnorm.kernels.cuda.memory import BLOCK_K, skinny_bytes, skinny_slot, tiles_of
from flashnorm.kernels.surroundings import Surroundings

_WARP = 32
_PROBLEM = struct.Struct("QQQqqiiiffi")


@dataclass(frozen=True)
class Form:
    """What else the kernel is compiled for: times eight rows of x, the operands' dtype, whether outputs are fp32, the
    activation of gated outputs, and whether a norm stands before the product."""

    tiles: int
    dtype: torch.dtype
    wide: bool = False
    activation: str | None = None
    normed: bool = True


def skinny(
    x: Tensor, weight: Tensor, out: Tensor, around: Surroundings, config: Skinny, *, static_weight: bool = False
) -> None:
    """Write `decode.reference.matvec` into `out` (M, N).

    `x`: (M, K), M at most 64; `weight`: (N, K), or (2N, K) where gated; bf16 or fp16, both addressable, and `out` of
    that dtype or fp32; bias and residual of x's dtype. No gain; an activation only where gated, and no bias there.
    `static_weight`: nothing that may still run writes the weight, so it is asked for before the kernel before this one
    has ended.
    """
    assert around.gain is None
    assert around.gated == (around.activation is not None)
    assert around.bias is None or not around.gated
    N, tiles, outputs = out.shape[1], tiles_of(len(x)), config.rows // (2 if around.gated else 1)
    form = Form(tiles, x.dtype, out.dtype == torch.float32, around.activation, around.eps is not None)
    kernel = _kernel(config, form, x.device)
    launch(
        kernel.function,
        Grid(-(-N // outputs) * config.split, _WARP * (warps_of(config) + 1), kernel.shared, cluster=config.split),
        (
            tensor_map(x, 8 * tiles, BLOCK_K),
            tensor_map(weight, outputs, BLOCK_K),
            packed_problem(x, out, around, static_weight=static_weight),
        ),
        current_stream(x.device),
    )


def packed_problem(x: Tensor, out: Tensor, around: Surroundings, *, static_weight: bool) -> bytes:
    """`struct Problem` of the source."""
    (M, K), N = x.shape, out.shape[1]
    bias, residual = around.bias, around.residual
    return _PROBLEM.pack(
        0 if bias is None else bias.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        out.data_ptr(),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        M,
        N,
        K,
        around.eps or 0.0,
        around.multiplier,
        static_weight,
    )


def warps_of(config: Skinny) -> int:
    """One for each half of a tile's columns and each sixteen of its rows, or more of them where those are many."""
    return 2 * min(4, config.rows // 16)


@cache
def _kernel(config: Skinny, form: Form, device: torch.device) -> kernels.Kernel:
    return kernels.kernel(source(config, form), "skinny", skinny_bytes(config, form.tiles), device)


def source(config: Skinny, form: Form) -> str:
    """The text that is compiled for one configuration and form."""
    macros = {
        "ROWS": config.rows,
        "TILES": form.tiles,
        "SPLIT": config.split,
        "STAGES": config.stages,
        "SLOT": skinny_slot(config, form.tiles),
        "WARPS": warps_of(config),
        "NORM": int(form.normed),
        "WIDE": int(form.wide),
        "ON_THE_WAY": config.stages,
        "TIMED": 0,
    }
    return kernels.source(("ring", "skinny"), macros, form.dtype, form.activation)
