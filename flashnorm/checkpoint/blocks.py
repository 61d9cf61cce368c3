"""Cut a tensor into contiguous blocks that fit a cache, such that a factor along any axis broadcasts in each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import torch


@dataclass(frozen=True)
class Block:
    """Elements `start` to `end` of a contiguous tensor: `tensor[(*lead, slice(first, last))]`."""

    start: int
    end: int
    lead: tuple[int, ...]
    first: int
    last: int


def blocks(shape: Sequence[int], limit: int) -> Iterator[Block]:
    """The blocks of a tensor of `shape`, in the order of its bytes, each of at most `limit` elements."""
    if prod(shape) == 0:
        return
    depth = next(d for d in range(len(shape)) if prod(shape[d + 1 :]) <= limit)
    row = prod(shape[depth + 1 :])
    step = limit // row
    start = 0
    for lead in product(*(range(size) for size in shape[:depth])):
        for first in range(0, shape[depth], step):
            last = min(first + step, shape[depth])
            end = start + (last - first) * row
            yield Block(start, end, lead, first, last)
            start = end


def block_shape(shape: Sequence[int], block: Block) -> tuple[int, ...]:
    """The shape in which a block's elements lie: (last - first, *trailing dimensions)."""
    return (block.last - block.first, *shape[len(block.lead) + 1 :])


def block_factor(factor: torch.Tensor, axis: int, ndim: int, block: Block) -> torch.Tensor:
    """The part of `factor` (1-D, along `axis` of a tensor with `ndim` dimensions) that broadcasts over a block."""
    depth = len(block.lead)
    if axis < depth:
        return factor[block.lead[axis]]
    part = factor[block.first : block.last] if axis == depth else factor
    return part.reshape(-1, *(1,) * (ndim - 1 - axis))
