"""The ledger of weights: which parameter is read how, through whatever views and copies the model makes of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from flashnorm.errors import TracingError
from flashnorm.sites.shadow import ZERO

UNTOUCHED = -2

# Storage, offset, shape and strides of a tensor.
Place = tuple[int, int, torch.Size, tuple[int, ...]]


def place(tensor: torch.Tensor) -> Place:
    """Where a tensor's elements lie. Two parameters of one place are one weight, whether or not they are one object:
    `head.weight = embedding.weight` and `head.weight.data = embedding.weight.data` tie them alike.
    """
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset()), tensor.shape, tensor.stride()


@dataclass
class Read:
    """One kind of reading operation, with what else took part in it."""

    op: str
    where: str
    bias: str | None
    pure: bool  # the operand was exactly the norm's output, so a norm's bias could move on


@dataclass
class Usage:
    """Everything that the trace saw of one parameter."""

    shape: torch.Size
    codes: dict[int, torch.Tensor] = field(default_factory=dict)  # axis -> code at each position along it
    reads: list[Read] = field(default_factory=list)
    others: list[tuple[str, str]] = field(default_factory=list)  # (op, where) of every other use
    added: int = 0  # how often it was added to a product
    added_to: Counter[str] = field(default_factory=Counter)  # and to those of which weights, how often
    conflict: str | None = None
    clashing: list[torch.Tensor] = field(default_factory=list)  # codes that met it where others had before

    @property
    def used(self) -> bool:
        return bool(self.codes or self.reads or self.others or self.added)


@dataclass(frozen=True)
class Located:
    """A tensor that is a view or a rearranged copy of a parameter: which parameter axis each dimension walks along."""

    name: str
    axes: tuple[tuple[int, int, int] | None, ...]  # per dimension: (axis, start, step), or None


class Ledger:
    """Knows every parameter by its storage and records how it is used.

    Raises `TracingError` where parameters overlap without being the same, or are not contiguous: then a storage does
    not say which parameter a view of it belongs to, or a stride which axis it walks along.
    """

    def __init__(self, model: nn.Module) -> None:
        self.usage: dict[str, Usage] = {}
        self.aliases: dict[str, list[str]] = {}  # parameter -> all of its names, its own first
        self._canonical: dict[str, str] = {}
        self._by_storage: dict[int, tuple[str, torch.Size]] = {}  # storage -> the parameter that fills it
        # Copies made during the run (dtype casts, gathered experts): storage -> what its own axes stand for.
        self._copies: dict[int, tuple[StorageWeakRef, torch.Size, Located]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            key = parameter.untyped_storage()._cdata
            if key in self._by_storage:
                first = self._by_storage[key][0]
                if place(parameter) != place(model.get_parameter(first)):
                    raise TracingError(f"{name} and {first} share memory without being the same; clone one of them")
                self.aliases[first].append(name)
                self._canonical[name] = first
                continue
            if not parameter.is_contiguous() or parameter.storage_offset():
                raise TracingError(f"{name} is a view of a larger tensor, or transposed; make it contiguous")
            self._by_storage[key] = (name, parameter.shape)
            self.usage[name] = Usage(parameter.shape)
            self.aliases[name] = [name]
            self._canonical[name] = name

    def locate(self, tensor: torch.Tensor) -> Located | None:
        """What part of which parameter `tensor` is; None when it is not one."""
        key = tensor.untyped_storage()._cdata
        if key in self._by_storage:
            name, shape = self._by_storage[key]
            return Located(name, _axes_of_view(tensor, shape))
        entry = self._copies.get(key)
        if entry is None or entry[0].expired():
            return None
        _, shape, original = entry
        own = _axes_of_view(tensor, shape)
        return Located(original.name, tuple(_compose(original, o) for o in own))

    def remember_copy(self, copy: torch.Tensor, located: Located) -> None:
        """`copy` is a contiguous tensor whose dimensions are those of `located`."""
        storage = copy.untyped_storage()
        if storage._cdata not in self._by_storage and copy.is_contiguous():
            self._copies[storage._cdata] = (StorageWeakRef(storage), copy.shape, located)

    def read(self, located: Located, dim: int, codes: torch.Tensor, read: Read) -> bool:
        """Record that `codes`, one per position of `dim`, meet the parameter. False where no axis can be named."""
        usage = self.usage[located.name]
        walk = located.axes[dim]
        if walk is None or sum(1 for w in located.axes if w is not None and w[0] == walk[0]) != 1:
            self.use(located.name, read.op, read.where)
            return False
        axis, start, step = walk
        line = usage.codes.setdefault(axis, torch.full((usage.shape[axis],), UNTOUCHED, dtype=torch.int32))
        part = line[start : start + step * len(codes) : step]
        fresh = (part == UNTOUCHED) & (codes != ZERO)
        clash = (codes != ZERO) & (part != UNTOUCHED) & (part // 2 != codes // 2)
        if clash.any():
            usage.clashing.append(codes)
            usage.conflict = (
                usage.conflict or f"it is read by different norms, or also by data without a norm, in {read.where}"
            )
        part.copy_(torch.where(fresh, codes, part))
        if read not in usage.reads:
            usage.reads.append(read)
        if read.bias is not None:
            self.usage[read.bias].added_to[located.name] += 1
        return True

    def use(self, name: str, op: str, where: str) -> None:
        """Record any use other than being contracted with an activation."""
        others = self.usage[name].others
        if (op, where) not in others:
            others.append((op, where))

    def add(self, name: str) -> None:
        """Record that the parameter is added to a product."""
        self.usage[name].added += 1

    def canonical(self, name: str) -> str:
        """The name under which the ledger knows a parameter that has several."""
        return self._canonical[name]


def copy_of(base: str, args: tuple[Any, ...], tensor: torch.Tensor, located: Located, result: Any) -> Located | None:
    """If `result` is a rearranged copy of a parameter: where its dimensions lie in it."""
    if not isinstance(result, torch.Tensor) or tensor is not args[0]:
        return None
    if base in ("clone", "_to_copy", "contiguous") and result.shape == tensor.shape:
        return located
    if base == "index_select":
        dim = args[1] % tensor.ndim
        return Located(located.name, tuple(None if d == dim else a for d, a in enumerate(located.axes)))
    if base == "index":
        used = [(d, i) for d, i in enumerate(args[1]) if i is not None]
        if len(used) == 1 and used[0][1].dtype != torch.bool:
            dim, index = used[0]
            axes = (*located.axes[:dim], *([None] * index.ndim), *located.axes[dim + 1 :])
            return Located(located.name, axes)
    return None


def _compose(original: Located, walk: tuple[int, int, int] | None) -> tuple[int, int, int] | None:
    if walk is None:
        return None
    dim, start, step = walk
    inner = original.axes[dim]
    return None if inner is None else (inner[0], inner[1] + start * inner[2], step * inner[2])


def _axes_of_view(view: torch.Tensor, shape: torch.Size) -> tuple[tuple[int, int, int] | None, ...]:
    """Which axis of the contiguous original each dimension of a view walks along, by its stride."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    offset, starts = view.storage_offset(), []
    for stride in strides:
        starts.append(offset // max(stride, 1))
        offset -= starts[-1] * stride
    walks: list[tuple[int, int, int] | None] = []
    for size, stride in zip(view.shape, view.stride(), strict=True):
        # A dimension of size one walks nowhere, and its stride means nothing.
        candidates = [a for a, s in enumerate(strides) if s <= stride and shape[a] > 1]
        if size == 1 or stride == 0 or not candidates or stride % strides[candidates[0]]:
            walks.append(None)
            continue
        axis = candidates[0]
        step = stride // strides[axis]
        last = starts[axis] + step * (size - 1)
        walks.append((axis, starts[axis], step) if last < shape[axis] else None)
    return tuple(walks)
