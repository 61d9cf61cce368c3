"""What each kind of operation does to rows that weights have written (`written_rows`).

Rows move with their elements, by the rules of `operations`. They may be multiplied by one number each, and added up
channel by channel. Everything else reads more of a row than its deviations from its mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from flashnorm.sites.contractions import PRODUCTS, attended
from flashnorm.sites.operations import PICKS, RULES, Blocked, Call, Context, require_known
from flashnorm.sites.shadow import PLAIN, ZERO, tagged
from flashnorm.sites.weights import Located
from flashnorm.sites.written_rows import Foreign, Laid, Rows, by_row

SUMS = {"add", "sub", "rsub"}
# Operations that pick and place elements, or make known ones.
MOVES = {
    *PICKS, "clone", "contiguous", "_to_copy", "alias", "detach", "_unsafe_view", "_reshape_alias", "dropout",
    "view_copy", "copy", "constant_pad_nd", "masked_fill", "fill", "zeros", "new_zeros", "zeros_like", "zero",
    "lift_fresh", "scalar_tensor", "full",
}  # fmt: skip
_MOST_TERMS = 64  # of a sum over an axis


class Follower(Protocol):
    """What the rules need to know of the running trace."""

    rows: Rows
    layers: tuple[Context, Context]

    @property
    def number_read(self) -> bool: ...

    def laid(self, tensor: torch.Tensor) -> Laid | None: ...

    def locate(self, tensor: torch.Tensor) -> Located | None: ...

    def written(self, parameter: str, walk: tuple[int, int, int], shape: torch.Size) -> Laid: ...

    def foreign(self, base: str) -> Foreign: ...

    def stop(self, carrying: list[torch.Tensor], reason: str, base: str) -> None: ...


@dataclass(frozen=True)
class Step:
    """One executed operation. `result` is what it returned."""

    func: Any
    base: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    follower: Follower

    def laid(self, value: Any) -> Laid:
        """The shadows of an operand; all plain, or zero, where it has none."""
        found = self.follower.laid(value) if isinstance(value, torch.Tensor) else None
        if found is not None:
            return found
        zero = not isinstance(value, torch.Tensor) and value == 0 and not self.follower.number_read
        plain = torch.tensor(ZERO if zero else PLAIN, dtype=torch.int32)
        shape = value.shape if isinstance(value, torch.Tensor) else torch.Size()
        return Laid(plain.expand(shape), torch.zeros((), dtype=torch.int32).expand(shape))


def laid_out(step: Step, carrying: list[torch.Tensor]) -> Laid | list[Laid] | None:
    """The shadows of what an operation returned; raises `Blocked` where it reads the mean of a row."""
    base, args = step.base, step.args
    if base in PRODUCTS:
        return _product(step, carrying)
    if base == "embedding":
        located = step.follower.locate(args[0])
        walk = located.axes[-1] if located else None
        return step.follower.written(located.name, walk, step.result.shape) if located and walk else None
    if base in SUMS:
        return _summed(step)
    if base in ("index_add", "scatter_add", "index_put") and (base != "index_put" or _accumulates(step)):
        return _accumulated(step) if carrying else None
    if base in MOVES:
        return _moved(step)
    if not carrying:
        return None
    if base in ("mul", "div", "true_divide", "neg"):
        return _scaled(step)
    if base in ("sum", "mean"):
        return _reduced(step)
    if RULES.get(base) is attended:
        raise Blocked("attention", "attention reads it")
    raise Blocked("non-linear", f"the operation {base} reads it")


def _product(step: Step, carrying: list[torch.Tensor]) -> Laid | None:
    bias = PRODUCTS[step.base]
    operands = step.args[1:3] if bias == 0 else step.args[:2]
    read = [t for t in carrying if any(t is operand for operand in operands)]
    step.follower.stop(read, "a linear layer or another product reads it", step.base)
    located = step.follower.locate(operands[1])
    if located is None or not isinstance(step.result, torch.Tensor):
        return None
    if step.base == "convolution":
        return _convolved(step, located)
    walk = located.axes[-1]
    if walk is None:
        return None
    laid = step.follower.written(located.name, walk, step.result.shape)
    return laid if bias is None else sum_of(step, laid, step.laid(step.args[bias]), step.result.shape)


def _convolved(step: Step, located: Located) -> Laid | None:
    """The channels that a convolution writes are its weight's first axis, and the second one of its result."""
    walk, transposed, bias = located.axes[0], step.args[6], step.args[2]
    if walk is None or transposed:
        return None
    shape = step.result.movedim(1, -1).shape
    laid = step.follower.written(located.name, walk, shape)
    if isinstance(bias, torch.Tensor):
        laid = sum_of(step, laid, step.laid(bias), shape)
    return Laid(laid.rows.movedim(-1, 1), laid.channels.movedim(-1, 1))


def _moved(step: Step) -> Laid | list[Laid] | None:
    rows, channels = (
        RULES[step.base](Call(step.func, step.args, step.kwargs, step.result, layer)) for layer in step.follower.layers
    )
    if isinstance(rows, (tuple, list)):
        return [Laid(r, c) for r, c in zip(rows, channels, strict=True)]
    return None if rows is None else Laid(rows, channels)


def _summed(step: Step) -> Laid:
    """a + alpha b, a - alpha b, or b - alpha a."""
    a, b = step.laid(step.args[0]), step.laid(step.args[1])
    alpha = step.kwargs.get("alpha", step.args[2] if len(step.args) > 2 else 1)
    if step.base == "rsub":
        a = Laid(step.follower.rows.renewed(a.rows), a.channels)
    elif step.base == "sub" or alpha != 1:
        b = Laid(step.follower.rows.renewed(b.rows), b.channels)
    return sum_of(step, a, b, step.result.shape)


def sum_of(step: Step, a: Laid, b: Laid, shape: torch.Size) -> Laid:
    """The shadows of a sum, of the given shape."""
    a, b = a.expand(shape), b.expand(shape)
    if not tagged(a.rows) and not tagged(b.rows):
        return Laid(torch.maximum(a.rows, b.rows), a.channels)
    if bool(((a.rows > 0) & (b.rows > 0) & (a.channels != b.channels)).any()):
        raise Blocked("mixed-channels", "different channels of it are added up")
    left, right = by_row(a.rows, b.rows)
    rows = step.follower.rows.summed(left, right, step.follower.foreign(step.base))
    return Laid(rows.expand(shape), torch.where(a.rows > 0, a.channels, b.channels))


def _scaled(step: Step) -> Laid:
    shape = step.result.shape
    a = step.laid(step.args[0]).expand(shape)
    other = step.args[1] if len(step.args) > 1 else 1
    b = step.laid(other).expand(shape)
    if step.kwargs.get("rounding_mode") is not None:
        raise Blocked("non-linear", "it is divided with rounding")
    if tagged(b.rows) and (tagged(a.rows) or step.base in ("div", "true_divide")):
        raise Blocked("second-tensor", "it is multiplied by another tensor of the kind, or is a divisor")
    carrier, factor = (a, other) if tagged(a.rows) else (b, step.args[0])
    place = None
    if isinstance(factor, torch.Tensor) and factor.numel() > 1:
        strides = factor.expand(shape).stride()
        along = [d for d, n in enumerate(shape) if n > 1 and _varies(carrier.channels, d)]
        if any(strides[d] for d in along):
            raise Blocked("channel-scale", "its channels are multiplied by different numbers")
        place = _positions(shape, [d for d in range(len(shape)) if d not in along])
    rows = step.follower.rows.renewed(carrier.rows, place)
    zero = (a.rows == ZERO) | (b.rows == ZERO)
    return Laid(torch.where(zero, ZERO, rows), carrier.channels)


def _varies(codes: torch.Tensor, dim: int) -> bool:
    return bool((codes != codes.narrow(dim, 0, 1)).any())


def _positions(shape: torch.Size, dims: list[int]) -> torch.Tensor:
    """A number for every position along `dims`, the same along all others."""
    sizes = [n if d in dims else 1 for d, n in enumerate(shape)]
    return torch.arange(torch.Size(sizes).numel()).view(sizes).expand(shape)


def _reduced(step: Step) -> Laid:
    """A sum over an axis of copies, of experts, say."""
    laid, dims = step.laid(step.args[0]), step.args[1] if len(step.args) > 1 else None
    dims = list(range(laid.rows.ndim)) if dims in (None, []) else [dims] if isinstance(dims, int) else list(dims)
    if len(dims) != 1 or laid.rows.shape[dims[0]] > _MOST_TERMS or _varies(laid.channels, dims[0]):
        raise Blocked("mixed-channels", f"the operation {step.base} reads it")
    parts = [
        Laid(laid.rows.select(dims[0], i), laid.channels.select(dims[0], i)) for i in range(laid.rows.shape[dims[0]])
    ]
    total = parts[0]
    for part in parts[1:]:
        total = sum_of(step, total, part, total.rows.shape)
    rows = step.follower.rows.renewed(total.rows)
    return Laid(rows.reshape(step.result.shape), total.channels.reshape(step.result.shape))


def _accumulates(step: Step) -> bool:
    return bool(step.args[3] if len(step.args) > 3 else step.kwargs.get("accumulate", False))


def _accumulated(step: Step) -> Laid:
    """`index_add`, `scatter_add` and their like, in rounds in which no place is added to twice."""
    if step.base == "index_put":
        used = [(d, index) for d, index in enumerate(step.args[1]) if index is not None]
        if len(used) != 1 or used[0][1].ndim != 1 or used[0][1].dtype == torch.bool:
            raise Blocked("mixed-channels", "it is added up in places that cannot be followed")
        (dim, index), source = used[0], step.args[2]
    else:
        dim, index, source = step.args[1], step.args[2], step.args[3]
    require_known([index])
    base, added = step.laid(step.args[0]), step.laid(source)
    dim = dim % base.rows.ndim
    if index.ndim > 1:
        lines = index.movedim(dim, 0).flatten(1)
        if not bool((lines == lines[:, :1]).all()) or index.shape[:dim] != base.rows.shape[:dim]:
            raise Blocked("mixed-channels", "it is added up in places that cannot be followed")
        index = lines[:, 0]
        added = Laid(added.rows.narrow(dim, 0, len(index)), added.channels.narrow(dim, 0, len(index)))
    shape = list(base.rows.shape)
    shape[dim] = len(index)
    added = Laid(step.follower.rows.renewed(added.rows.expand(shape)), added.channels.expand(shape))
    rows, channels = base.rows.clone(), base.channels.clone()
    left = torch.arange(len(index))
    while len(left):
        first = _first_of_each(index[left])
        now, left = left[first], left[~first]
        places = index[now]
        terms = Laid(rows.index_select(dim, places), channels.index_select(dim, places))
        source_part = Laid(added.rows.index_select(dim, now), added.channels.index_select(dim, now))
        total = sum_of(step, terms, source_part, terms.rows.shape)
        rows.index_copy_(dim, places, total.rows.contiguous())
        channels.index_copy_(dim, places, total.channels.contiguous())
    return Laid(rows, channels)


def _first_of_each(index: torch.Tensor) -> torch.Tensor:
    """A mask of the places at which each number stands for the first time."""
    kinds, kind = torch.unique(index, return_inverse=True)
    places = torch.full((len(kinds),), len(index)).scatter_reduce(0, kind, torch.arange(len(index)), "amin")
    mask = torch.zeros(len(index), dtype=torch.bool)
    mask[places] = True
    return mask
