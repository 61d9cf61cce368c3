"""What ends a block: the residual add, and with it the sum of squares that the next norm needs."""

from typing import Optional

import torch
from torch import Tensor
from torch.library import custom_op

from flashnorm.errors import ShapeError
from flashnorm.kernels import reference
from flashnorm.kernels.arguments import check_alike, check_linear
from flashnorm.kernels.dispatch import triton_runs
from flashnorm.kernels.layout import on_device_of, row_contiguous
from flashnorm.kernels.reference import WithSumsq


def linear_residual(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    *,
    bias: Optional[Tensor] = None,  # noqa: UP045
) -> WithSumsq:
    """residual + x Wᵀ + bias, and the sum of squares of each of its rows, for the norm that reads it next.

    `x`: (..., K); `weight`: (N, K); `residual`: (..., N); `bias`: (N,). All of one dtype and on one device. Returns the
    value (..., N) in `x.dtype` and the sums (...,) in fp32 (fp64 for fp64). The matmul is the library's, its product is
    rounded to `x.dtype`, and the add and the sums are one pass. There is no backward.

    Raises `ShapeError`, `DtypeError`, `DeviceError` or `GradientError`, naming the argument.
    """
    check_linear(x, weight, residual=residual, bias=bias)
    return WithSumsq(*_linear_residual(x, weight, residual, bias))


def add_sumsq(x: Tensor, residual: Tensor) -> WithSumsq:
    """residual + x, and the sum of squares of each of its rows. Both (..., N), of one dtype and on one device.

    Returns the value (..., N) in `x.dtype` and the sums (...,) of the rounded value, in fp32 (fp64 for fp64). There is
    no backward. Raises `ShapeError`, `DtypeError`, `DeviceError` or `GradientError`, naming the argument.
    """
    if x.dim() == 0 or x.shape != residual.shape:
        raise ShapeError(f"residual must be of x's shape {tuple(x.shape)}, not {tuple(residual.shape)}")
    check_alike(x=x, residual=residual)
    return WithSumsq(*_add_sumsq(x, residual))


@custom_op("flashnorm::linear_residual", mutates_args=())
def _linear_residual(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    bias: Optional[Tensor],  # noqa: UP045
) -> tuple[Tensor, Tensor]:
    if not triton_runs(x.device) or x.dtype == torch.float64:
        value, sumsq = reference.linear_residual(x, weight, residual, bias)
        return value, sumsq
    return _add(torch.nn.functional.linear(x, weight, bias), residual)


@_linear_residual.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    bias: Optional[Tensor],  # noqa: UP045
) -> tuple[Tensor, Tensor]:
    return _like(residual)


@custom_op("flashnorm::add_sumsq", mutates_args=())
def _add_sumsq(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    if not triton_runs(x.device) or x.dtype == torch.float64:
        value, sumsq = reference.add_sumsq(x, residual)
        return value, sumsq
    return _add(x, residual)


@_add_sumsq.register_fake
def _(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    return _like(residual)


def _like(residual: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(residual.dtype, torch.float32)
    return residual.new_empty(residual.shape), residual.new_empty(residual.shape[:-1], dtype=wide)


def _add(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    from flashnorm.kernels.elementwise import add_sumsq

    value, sumsq = _like(residual)
    if value.numel():
        width = x.shape[-1]
        rows = row_contiguous(x.reshape(-1, width)), row_contiguous(residual.reshape(-1, width))
        with on_device_of(x):
            add_sumsq(*rows, value.view(-1, width), sumsq.view(-1))
    return value, sumsq
