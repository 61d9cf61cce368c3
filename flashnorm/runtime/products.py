"""The two products of level one, without the checks that were made once, when the modules were replaced.

In eager mode a registered operation costs more of the host's time than the kernel behind it takes, so the dispatcher is
called directly; under `torch.compile` it is the registered operation, which is opaque to the compiler. The weights are
said to be static: what changes them (`merging`) waits until they are written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashnorm.errors import DeviceError, DtypeError
from flashnorm.kernels import gated_ops, ops  # noqa: F401  (registers the operations)
from flashnorm.kernels.configs import Config
from flashnorm.kernels.dispatch import MATRIX_ROWS, choose, problem_of
from flashnorm.kernels.layout import row_contiguous
from flashnorm.kernels.run import run

# How to run, by the number of rows of x, the distance between them and their alignment; for few rows only, where
# choosing takes longer than the kernel.
Chosen = dict[tuple[int, int, bool], Config]


def rms_product(
    x: Tensor, weight: Tensor, eps: float, gain: Tensor | None, bias: Tensor | None, chosen: Chosen
) -> Tensor:
    """((x ⊙ gain) Wᵀ) / RMS(x) + bias, as `flashnorm.rms_linear`.

    `x`: (..., K); `weight`: (N, K), contiguous; `gain`: (K,) in any floating-point dtype, so that 1 + w need not be
    rounded; `bias`: (N,); `chosen`: kept by the caller for these very operands but x. Returns (..., N) in `x.dtype`.
    Raises `DtypeError` or `DeviceError` where x is not like the weight.
    """
    if torch.compiler.is_compiling():
        product: Tensor = torch.ops.flashnorm.rms_linear(x, weight, eps, gain, bias, True)
        return product
    return _run(x, weight, eps, gain, bias, None, weight.shape[0], chosen)


def gated_product(
    x: Tensor, weight: Tensor, eps: float, gain: Tensor | None, activation: str, chosen: Chosen
) -> Tensor:
    """act(gate) ⊙ up of the product above, as `flashnorm.kernels.rms_swiglu_linear`. `weight`: (2N, K), gate first."""
    if torch.compiler.is_compiling():
        product: Tensor = torch.ops.flashnorm.rms_swiglu_linear(x, weight, eps, gain, activation, True)
        return product
    return _run(x, weight, eps, gain, None, activation, weight.shape[0] // 2, chosen)


def _run(
    x: Tensor,
    weight: Tensor,
    eps: float,
    gain: Tensor | None,
    bias: Tensor | None,
    activation: str | None,
    outputs: int,
    chosen: Chosen,
) -> Tensor:
    if x.dtype is not weight.dtype:
        raise DtypeError(f"the hidden states are {x.dtype} but the weights are {weight.dtype}; convert one of them")
    if x.device != weight.device:
        raise DeviceError(f"the hidden states are on {x.device} but the weights on {weight.device}; move one of them")
    if x.is_cuda and x.get_device() != torch.cuda.current_device():  # Triton launches on the current device
        with torch.cuda.device(x.device):
            return _run(x, weight, eps, gain, bias, activation, outputs, chosen)
    out = x.new_empty((*x.shape[:-1], outputs))
    if out.numel():
        rows, target = row_contiguous(x.reshape(-1, x.shape[-1])), out.view(-1, outputs)
        few = len(rows) <= MATRIX_ROWS
        key = len(rows), rows.stride(0), rows.data_ptr() % 16 == 0
        config = chosen.get(key) if few else None
        if config is None:
            config = choose(problem_of(rows, weight, gain, target, activation=activation), x.device)
            if few:
                chosen[key] = config
        run(config, rows, weight, eps, gain, bias, target, activation, static_weight=True)
    return out
