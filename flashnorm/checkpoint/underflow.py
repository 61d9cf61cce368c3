"""Weights that become zero though neither they nor their gains were: what is lost below the smallest number of a dtype.

An infinity is refused at once. A zero here and there is in the nature of fp16: of the weights of any tensor, a few lie
that near to zero. Too many of them say that the whole tensor has sunk to where fp16 has few bits left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from flashnorm.checkpoint.blocks import Block
from flashnorm.checkpoint.plan import Scale
from flashnorm.errors import CheckpointError


def tolerable_fraction(dtype: torch.dtype) -> float:
    """How large a part of a tensor may vanish before the fold rounds worse than it says: u / sqrt(2 pi).

    Numbers below the normal ones are s apart. Of weights spread normally with deviation d, the part that lies within
    s / 2 of zero is s / (d sqrt(2 pi)). One rounding moves a normal number by u = eps / 2 of itself at most, and s is
    that part of d when s / d = u. For fp16 this gives 1.9e-4: two weights in ten thousand.
    """
    return torch.finfo(dtype).eps / 2 / math.sqrt(2 * math.pi)


class Vanishing:
    """Counts the weights of one tensor that vanish, block by block; `count`: so many so far."""

    def __init__(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.count = 0
        self._name, self._shape, self._dtype = name, tuple(shape), dtype
        limits = torch.finfo(dtype)
        self._half = limits.smallest_normal * limits.eps / 2  # what lies below this rounds to zero
        # For every axis and position on it: how many zeros there are, and how many of them are new.
        self._zeros = [torch.zeros(length, dtype=torch.int64) for length in shape]
        self._lost = [torch.zeros(length, dtype=torch.int64) for length in shape]

    def look(
        self, block: Block, scales: Sequence[Scale], source: torch.Tensor, size: torch.Tensor, low: torch.Tensor
    ) -> None:
        """Take in one block. `source`: its weights, 1-D. `size`: the absolute products, 1-D. `low`: the least of them.

        Raises `CheckpointError` with the tensor's last block, where all of a row or column has vanished, or more than
        the `tolerable_fraction`; a single weight is never too many.
        """
        if not low > self._half:
            self._count(block, scales, source, size)
        if block.end == math.prod(self._shape) and self.count:
            self._judge()

    def _count(self, block: Block, scales: Sequence[Scale], source: torch.Tensor, size: torch.Tensor) -> None:
        found = (size <= self._half).nonzero().flatten()
        places = _places(block, self._shape, found)
        lost = source[found] != 0
        for scale in scales:
            lost &= scale.factor[places[scale.axis % len(self._shape)]] != 0
        self.count += int(lost.sum())
        for place, zeros, new in zip(places, self._zeros, self._lost, strict=True):
            zeros += torch.bincount(place, minlength=len(zeros))
            new += torch.bincount(place[lost], minlength=len(new))

    def _judge(self) -> None:
        total = math.prod(self._shape)
        allowed = max(1.0, tolerable_fraction(self._dtype) * total)
        line = self._whole_line() if len(self._shape) > 1 else None
        if self.count > allowed or line is not None:
            what = f"all of position {line[1]} on axis {line[0]}" if line else f"{self.count} of {total} weights"
            raise CheckpointError(
                f"{self._name!r} does not fit its dtype any more: {what} would become zero in {self._dtype} for being "
                "too small; store the model as bfloat16 or float32 first"
            )

    def _whole_line(self) -> tuple[int, int] | None:
        """The first axis and position of which nothing but zeros is left, some of them new."""
        total = math.prod(self._shape)
        for axis, (zeros, new) in enumerate(zip(self._zeros, self._lost, strict=True)):
            length = total // self._shape[axis]
            gone = ((new > 0) & (zeros == length)).nonzero()
            if len(gone) and length > 1:  # one weight is no line: a score of one label has a single row
                return axis, int(gone[0])
        return None


def _places(block: Block, shape: tuple[int, ...], found: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The positions on every axis of a tensor of the elements `found` of one of its blocks.

    Not `torch.unravel_index`, which imports a compiler's worth of modules when it is first called.
    """
    places, rest = [], found + block.start
    for length in reversed(shape):
        places.append(rest % length)
        rest = rest // length
    return tuple(reversed(places))
