"""The arithmetic of a fold on one tensor: exact or nearly exact products, and one rounding to the stored dtype.

A bf16 or fp16 weight times a gain of the same dtype is exact in fp32 (16 or 22 significant bits), so the only error
is the final rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import torch

from flashnorm.algebra import product_dtype
from flashnorm.checkpoint.blocks import Block, block_factor, block_shape
from flashnorm.checkpoint.header import TensorInfo
from flashnorm.checkpoint.plan import NewBias, Scale, Shift, TensorEdit
from flashnorm.checkpoint.source import Source
from flashnorm.checkpoint.underflow import Vanishing
from flashnorm.errors import CheckpointError

# 1 MiB of fp32, which stays in a core's second-level cache between the passes over it: measured, 128 KiB and 4 MiB
# are both about a third slower.
BLOCK_ELEMENTS = 256 * 1024

_SCALABLE = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})


def check_scales(name: str, info: TensorInfo, scales: Sequence[Scale]) -> None:
    """Raise `CheckpointError` where a factor does not fit the tensor, or holds a NaN or an infinity."""
    if scales and info.dtype not in _SCALABLE:
        raise CheckpointError(f"{name!r} is stored as {info.code}, and only floating-point weights can be scaled")
    for scale in scales:
        _check(name, info, scale)


class Scaler:
    """The scales of one tensor, ready to be applied block by block; for one thread at a time."""

    def __init__(self, name: str, info: TensorInfo, scales: Sequence[Scale]) -> None:
        self.name = name
        self.shape = info.shape
        self.dtype = info.dtype
        self._work = product_dtype(info.dtype, (scale.factor.dtype for scale in scales))
        self._scales = [(scale, scale.factor.to(self._work)) for scale in scales]
        self._scratch = torch.empty(min(info.numel, BLOCK_ELEMENTS), dtype=self._work)
        self._vanishing = Vanishing(name, info.shape, info.dtype)

    @property
    def vanished(self) -> int:
        """How many weights have become zero so far, though neither they nor their gains were."""
        return self._vanishing.count

    def apply(self, block: Block, source: torch.Tensor, out: torch.Tensor) -> None:
        """Write the scaled block to `out`. `source`, `out`: 1-D, the block's elements, of the stored dtype.

        The blocks of a tensor come in the order of its bytes. Raises `CheckpointError` where a finite weight becomes
        infinite, which fp16 allows from 65520 on, and after the last block where too many have become zero.
        """
        shape = block_shape(self.shape, block)
        product = self._scratch[: block.end - block.start].view(shape)
        product.copy_(source.view(shape))
        for scale, factor in self._scales:
            part = block_factor(factor, scale.axis % len(self.shape), len(self.shape), block)
            if scale.divide:
                product.div_(part)
            else:
                product.mul_(part)
        out.copy_(product.view(-1))
        size = product.view(-1).abs_()
        low, high = torch.aminmax(size)
        if not high <= torch.finfo(self.dtype).max:  # a NaN of the source's own comes here as well
            _refuse_overflow(self.name, source, out)
        self._vanishing.look(block, [scale for scale, _ in self._scales], source, size, low)


def rewritten(source: Source, name: str, info: TensorInfo, edit: TensorEdit) -> torch.Tensor:
    """The new value of a small tensor (a gain, a bias) whose edit is more than scaling.

    With `fill` or `replace` the old value does not matter; else it is `scales * old + sum(weight @ vector)`, in fp64,
    rounded once. Returns the stored dtype and shape.
    """
    if edit.fill is not None:
        return torch.full(info.shape, edit.fill, dtype=info.dtype)
    if edit.replace is not None:
        return _replacement(name, info, edit.replace)
    old = source.read(info.name)
    value = old.double()
    for scale in edit.scales:
        factor = scale.factor.double().reshape(-1, *(1,) * (len(info.shape) - 1 - scale.axis % len(info.shape)))
        value = value / factor if scale.divide else value * factor
    for shift in edit.shifts:
        value = value + _shift(source, name, info, shift)
    new = value.to(info.dtype)
    _refuse_overflow(name, old, new)
    return new


def new_bias(source: Source, name: str, new: NewBias, shifts: Sequence[Shift]) -> torch.Tensor:
    """The values of a bias that the source does not store: the sum of what moves into it, in fp64, rounded once."""
    weight = source.tensors[new.weight]
    info = replace(weight, name=name, shape=(new.size,))
    total = torch.zeros(new.size, dtype=torch.float64)
    for shift in shifts:
        total = total + _shift(source, name, info, shift)
    value = total.to(weight.dtype)
    _refuse_overflow(name, total, value)
    return value


def _replacement(name: str, info: TensorInfo, tensor: torch.Tensor) -> torch.Tensor:
    if tuple(tensor.shape) != info.shape:
        raise CheckpointError(f"{name!r} is stored as {list(info.shape)}, not as {list(tensor.shape)}")
    new = tensor.to(info.dtype).contiguous()
    _refuse_overflow(name, tensor, new)
    return new


def _shift(source: Source, name: str, info: TensorInfo, shift: Shift) -> torch.Tensor:
    vector = shift.vector.double()
    if not torch.isfinite(vector).all():
        raise CheckpointError(f"the norm's bias that would move into {name!r} holds a NaN or an infinity")
    shape = source.tensors[shift.weight].shape
    axis = shift.axis % len(shape)
    rest = shape[:axis] + shape[axis + 1 :]
    if shape[axis] != len(vector) or rest != info.shape:
        raise CheckpointError(
            f"{name!r} of shape {list(info.shape)} cannot take a shift of length {len(vector)} through "
            f"{shift.weight!r} of shape {list(shape)}"
        )
    total = torch.zeros(rest, dtype=torch.float64)
    # In slices of the first dimension: a fp64 copy of a whole head would be four times its size.
    step = max(1, BLOCK_ELEMENTS * shape[0] // max(1, prod(shape)))
    for first in range(0, shape[0], step):
        part = source.read_rows(shift.weight, first, min(first + step, shape[0])).double()
        if axis == 0:
            total += torch.tensordot(part, vector[first : first + step], dims=([0], [0]))
        else:
            total[first : first + step] = torch.tensordot(part, vector, dims=([axis], [0]))
    return total


def _check(name: str, info: TensorInfo, scale: Scale) -> None:
    fits = -len(info.shape) <= scale.axis < len(info.shape) and scale.factor.shape == (info.shape[scale.axis],)
    if not fits:
        raise CheckpointError(
            f"{name!r} of shape {list(info.shape)} does not take {len(scale.factor)} gains along axis {scale.axis}; "
            "the config and the weights belong to different models"
        )
    if not torch.isfinite(scale.factor).all():
        position = int((~torch.isfinite(scale.factor)).nonzero()[0])
        raise CheckpointError(
            f"the gain for {name!r} is {scale.factor[position].item()} at channel {position}; "
            "repair the norm before folding"
        )


def _refuse_overflow(name: str, source: torch.Tensor, out: torch.Tensor) -> None:
    lost = torch.isfinite(source) & ~torch.isfinite(out)
    if lost.any():
        raise CheckpointError(
            f"{name!r} does not fit its dtype any more: {source[lost][0].item():g} becomes "
            f"{out[lost][0].item():g} in {out.dtype}; store the model as bfloat16 or float32 first"
        )
