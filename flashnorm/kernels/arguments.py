"""What the operations accept, checked once, with an error that names the argument."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flashnorm.errors import DeviceError, DtypeError, GradientError, ShapeError
from flashnorm.kernels.codes import LARGEST

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_linear(
    x: Tensor, weight: Tensor, *, rows: int | None = None, backward: bool = False, **others: Tensor | None
) -> None:
    """Check the operands of a linear that reads `x`: (..., K) by `weight`: (N, K).

    `others` are optional operands by name: `gain` must be (K,), `residual` and `out` (..., N), and anything else (N,),
    where N is `rows` if given. `backward`: the operation has one. Raises `ShapeError`, `DtypeError`, `DeviceError` or
    `GradientError`.
    """
    given = _check_shapes(x, weight, rows, others)
    operands = {"x": x, "weight": weight, **given}
    _check_kinds(operands)
    if not backward or "out" in given:
        _check_no_gradient(operands)


def check_quantized_linear(x: Tensor, weight: Tensor, weight_scale: Tensor, **others: Tensor | None) -> None:
    """Check the operands of a linear whose `weight` (N, K) holds codes with a `weight_scale` (N,) in fp32.

    `others` as in `check_linear`. Raises `ShapeError`, `DtypeError`, `DeviceError` or `GradientError`.
    """
    given = _check_shapes(x, weight, None, {"weight_scale": weight_scale, **others})
    del given["weight_scale"]
    if weight.dtype not in LARGEST:
        raise DtypeError(f"weight is {weight.dtype}; give codes in float8_e4m3fn or int8, from quantize_weight")
    if weight_scale.dtype != torch.float32:
        raise DtypeError(f"weight_scale is {weight_scale.dtype}; give it in float32")
    if x.dtype == torch.float64:
        raise DtypeError("x is torch.float64; use bfloat16, float16 or float32")
    operands = {"x": x, **given}
    _check_kinds(operands)
    _check_devices({"x": x, "weight": weight, "weight_scale": weight_scale})
    _check_no_gradient({**operands, "weight_scale": weight_scale})


def check_alike(**tensors: Tensor) -> None:
    """Check that operands, the first of them x, have one dtype and one device and want no gradient."""
    _check_kinds(tensors)
    _check_no_gradient(tensors)


def check_separate(out: Tensor, **operands: Tensor | None) -> None:
    """Raise `ShapeError` where `out` may share memory with an operand: some programs write while others still read."""
    first, last = _extent(out)
    for name, operand in operands.items():
        if operand is None or operand.untyped_storage().data_ptr() != out.untyped_storage().data_ptr():
            continue
        start, end = _extent(operand)
        if first < end and start < last:
            raise ShapeError(f"out overlaps {name} in memory; give a buffer of its own")


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The first address of a tensor and the one behind its last."""
    if tensor.numel() == 0:
        return tensor.data_ptr(), tensor.data_ptr()
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()


def _check_shapes(
    x: Tensor, weight: Tensor, rows: int | None, others: Mapping[str, Tensor | None]
) -> dict[str, Tensor]:
    """Those of `others` that are given."""
    if x.dim() == 0:
        raise ShapeError("x must have at least one axis, the width K, but it is a scalar")
    if weight.dim() != 2:
        raise ShapeError(f"weight must be a matrix (N, K), not of shape {tuple(weight.shape)}")
    if x.shape[-1] != weight.shape[1] or x.shape[-1] == 0:
        raise ShapeError(f"x of width {x.shape[-1]} does not fit a weight of shape {tuple(weight.shape)} (N, K)")
    outputs = weight.shape[0] if rows is None else rows
    given = {name: tensor for name, tensor in others.items() if tensor is not None}
    for name, tensor in given.items():
        wanted = _wanted_shape(name, x, outputs)
        if tuple(tensor.shape) != wanted:
            raise ShapeError(f"{name} must be of shape {wanted}, not {tuple(tensor.shape)}")
    return given


def _wanted_shape(name: str, x: Tensor, outputs: int) -> tuple[int, ...]:
    if name == "gain":
        return (x.shape[-1],)
    return (*x.shape[:-1], outputs) if name in ("residual", "out") else (outputs,)


def _check_kinds(tensors: dict[str, Tensor]) -> None:
    """One dtype and one device."""
    x = tensors["x"]
    if x.dtype not in DTYPES:
        raise DtypeError(f"x is {x.dtype}; use bfloat16, float16, float32 or float64")
    for name, tensor in tensors.items():
        if tensor.dtype != x.dtype:
            raise DtypeError(f"{name} is {tensor.dtype} but x is {x.dtype}; convert one of them")
    _check_devices(tensors)


def _check_devices(tensors: dict[str, Tensor]) -> None:
    x = tensors["x"]
    for name, tensor in tensors.items():
        if tensor.device != x.device:
            raise DeviceError(f"{name} is on {tensor.device} but x is on {x.device}; move one of them")


def _check_no_gradient(tensors: dict[str, Tensor]) -> None:
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if tensor.requires_grad:
            what = "with out this operation" if "out" in tensors else "this operation"
            raise GradientError(f"{name} requires grad, but {what} has no backward; use torch.no_grad()")
