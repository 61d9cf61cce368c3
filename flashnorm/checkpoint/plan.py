"""What a fold does to the tensors on disk, as data. Planning and writing are separate: this is the seam."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

# How `config.json` says that a checkpoint lacks its gains: loaders that do not know the mark would set them at random.
STRICT_MARK: Mapping[tuple[str, ...], object] = MappingProxyType({("flashnorm",): {"mode": "strict"}})


@dataclass(frozen=True)
class Scale:
    """Multiply a stored tensor along one axis. `factor`: fp32 (fp64 for fp64 tensors), 1-D, as long as that axis."""

    axis: int
    factor: torch.Tensor
    divide: bool = False  # divide instead, which rounds less than multiplying by the reciprocal


@dataclass(frozen=True)
class Shift:
    """Add `weight @ vector` to a stored bias: a norm's bias that moves into the next linear's.

    `weight` names a stored matrix (out, in) as it stands in the *source*, or a stack of them; `vector`: (in,), fp32 or
    fp64. What remains of the weight's shape without `axis` is the bias's shape.
    """

    weight: str
    vector: torch.Tensor
    axis: int = -1  # the axis of `weight` that `vector` lies along; 0 where the matrix is stored (in, out)


@dataclass(frozen=True)
class TensorEdit:
    """The change of one stored tensor: scales, then shifts, with one rounding; or a constant, or removal."""

    scales: tuple[Scale, ...] = ()
    shifts: tuple[Shift, ...] = ()
    fill: float | None = None  # the norm's weight at its identity (compatible mode), or its bias at zero
    replace: torch.Tensor | None = field(default=None)  # a small tensor written as it is, cast to the stored dtype
    remove: bool = False  # strict mode: the gain is not stored any more


@dataclass(frozen=True)
class NewBias:
    """A bias (size,) that the source does not store: zero, but for what moves into it (the edit of its name).

    `weight`: the stored weight behind which it is added; it goes to the same shard, in the same dtype.
    """

    weight: str
    size: int


@dataclass(frozen=True)
class FoldedSite:
    """One folded norm as the manifest records it."""

    norm: str
    gain_tensor: str  # stored name of the norm's weight
    bias_tensor: str | None
    convention: str  # "plain" or "one-plus"
    offset: float
    # stored name -> the axis that was scaled and the gain index at each position (None: the identity map)
    readers: dict[str, tuple[int, torch.Tensor | None]]


@dataclass(frozen=True)
class FoldPlan:
    """Everything that a fold will do, before anything is written."""

    edits: dict[str, TensorEdit]
    additions: dict[str, str]  # new stored name -> stored name it is a copy of (an untied head), before its own edit
    sites: tuple[FoldedSite, ...]
    skipped: dict[str, str]  # norm -> reason
    mode: str  # "compatible" or "strict"
    untied: bool = False
    config_changes: dict[tuple[str, ...], object] = field(default_factory=dict)  # path into config.json -> new value
    new_biases: dict[str, NewBias] = field(default_factory=dict)  # new stored name -> what it is before its edit
    keeps_bias: tuple[str, ...] = ()  # the norms of `sites` whose bias stays, divided by the gain


def changed(config: Mapping[str, Any], changes: Mapping[tuple[str, ...], object]) -> dict[str, Any]:
    """`config` with the changes of a plan in it, keys in their old order; nested tables that it lacks are made."""
    new = copy.deepcopy(dict(config))
    for path, value in changes.items():
        table = new
        for key in path[:-1]:
            table = table.setdefault(key, {})
        table[path[-1]] = value
    return new
