"""How matrices lie in memory, where kernels care."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """A context in which the device of `x` is the current one: kernels are launched on the current device."""
    if not x.is_cuda or x.get_device() == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.get_device())


def addressable(matrix: Tensor) -> bool:
    """Whether the bulk copy engine can address it: rows contiguous, base and row stride multiples of 16 bytes."""
    return (
        matrix.stride(1) == 1
        and matrix.stride(0) >= matrix.shape[1]
        and matrix.data_ptr() % 16 == 0
        and matrix.stride(0) * matrix.element_size() % 16 == 0
    )


def row_contiguous(matrix: Tensor) -> Tensor:
    """The matrix itself if its rows are contiguous, else a copy of it."""
    return matrix if matrix.stride(-1) == 1 else matrix.contiguous()


def row_bytes(matrix: Tensor, at_most: int) -> int:
    """The bytes of a row that a bulk request can name: a multiple of 16, none where the matrix is not addressable."""
    return min(at_most, matrix.shape[1] * matrix.element_size()) // 16 * 16 if addressable(matrix) else 0
